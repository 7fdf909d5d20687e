"""The wrapper DistributedDataParallel, its arguments, its checks and its communication hooks.

May import: the leaves and all floors below but rendezvous. Must never call MPI, nor start or end
a world.
"""

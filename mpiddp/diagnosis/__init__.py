"""The parts of the doctor's report that are about more than one room.

May import: the leaves, system, mpi, gpu, rendezvous and transports. Must never change what it looks
at.
"""

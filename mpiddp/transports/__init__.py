"""The transports, by which the bytes of buckets travel, and the choice among them.

May import: the leaves, system, mpi, torch_internals, gpu, engine. Must never know a parameter, a
hook or a process group.
"""

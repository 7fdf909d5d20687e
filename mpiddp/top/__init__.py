"""`python -m mpiddp.top`: what the ranks of a user's jobs on this node do now, seen from outside.

docs/how-to/top.md tells what it shows.

May import: the leaves and system. Must never import torch, mpi4py or an MPI, nor stop or write to
a process that it looks at.
"""

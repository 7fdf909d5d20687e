"""python -m mpiddp: run an unmodified torchrun script, and end the job when a rank fails.

May import: the leaves, mpi, torch_internals, process_group, rendezvous, ddp. Must never be imported
by another room.
"""

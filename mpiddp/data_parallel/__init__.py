"""torch.nn.DataParallel over MPI ranks: rank 0's script sees the whole batch, the others serve it.

May import: the leaves, system, mpi, torch_internals, engine, collectives and rendezvous. Must never
start or end a world of torch.distributed.
"""

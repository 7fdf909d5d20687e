"""Each operation of torch.distributed as a function on host tensors.

May import: the leaves, system, mpi, torch_internals, engine, transports. Must never know how an
operation is started, waited for or timed: it yields what it waits for.
"""

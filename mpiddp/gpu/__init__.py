"""The runtime of CUDA or HIP, found when the program runs: streams, events, copies, sums.

May import: the leaves, system, mpi. Must never send by MPI, and nothing links a GPU's library.
"""

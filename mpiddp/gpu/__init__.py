"""The runtime of CUDA or HIP, found when the program runs: streams, events, copies, sums.

May import: the leaves, system. Must never call MPI, and nothing links a GPU's library.
"""

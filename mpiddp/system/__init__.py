"""Code for the processor and the operating system: loops over gradients, threads, clocks, waiting.

May import: the leaves (`settings`). Must never know MPI, torch or what a gradient is for.
"""

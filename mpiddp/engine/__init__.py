"""Ordered channels of jobs, the progress that they make, and their completion.

May import: the leaves, system, mpi. Must never know autograd or a particular transport.
"""

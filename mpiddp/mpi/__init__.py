"""The MPI library: which one it is, its errors, datatypes and nodes, and how a job is ended.

May import: the leaves. Must never know buckets, models or process groups.
"""

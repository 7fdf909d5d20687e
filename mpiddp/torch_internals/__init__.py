"""What torch does not promise: code that depends on its releases and on its C functions.

May import: the leaves. Must never know MPI.
"""

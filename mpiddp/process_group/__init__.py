"""torch's ProcessGroup: start operations, wait for them, and say who is missing.

May import: the leaves and all floors below. Must never touch the gradients of a wrapped module:
the engine reduces them.
"""

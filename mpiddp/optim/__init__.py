"""Optimizers that step parameters once for all ranks of a node.

May import: the leaves, system, mpi, torch_internals, transports, reducer and ddp. Must never start
or end a world.
"""

from mpiddp.optim.node_optimizer import NodeOptimizer

__all__ = ["NodeOptimizer"]

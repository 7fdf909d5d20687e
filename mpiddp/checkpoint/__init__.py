"""Checkpoints that survive: whole or not there, checked when they are read, the last ones kept.

    checkpoint.save({"model": ..., "optimizer": ...}, "checkpoints", step=1200)
    found = checkpoint.load("checkpoints")  # None: there is none

They need torch.distributed only, so they work on groups of any backend, and without one.

May import: the leaves and torch_internals. Must never write where a whole checkpoint lies.
"""

from mpiddp.checkpoint.loading import Checkpoint, load
from mpiddp.checkpoint.saving import async_save, save
from mpiddp.checkpoint.snapshots import Snapshots

__all__ = ["Checkpoint", "Snapshots", "async_save", "load", "save"]

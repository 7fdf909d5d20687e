"""A group of the same ranks as another one, for a thread that calls collectives beside the program.

Collectives of two threads on one group would be called in other orders on other ranks.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

__all__ = ["twin_of"]

_twins: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)


def twin_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the ranks of `group`: the same one each time, and nobody else's.

    Collective over `group` when it is made.
    """
    if group not in _twins:
        _twins[group] = dist.new_group(
            dist.get_process_group_ranks(group), use_local_synchronization=True
        )
    return _twins[group]

"""A second process group of a process set, for calls that all ranks make in the same order.

Collectives of a process set's own group start in the order on which its ranks agree, see Note
[Operations are matched by name], and some may wait for their turn. The optimizer's and those that
broadcast state are called in the same order on all ranks, and must not meet these.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mpiddp.torch_internals.versions import new_group_in_order

if TYPE_CHECKING:
    from mpiddp.process_group.group import ProcessGroup

_made: weakref.WeakKeyDictionary[Any, ProcessGroup] = weakref.WeakKeyDictionary()


def group_in_order(group: ProcessGroup) -> ProcessGroup:
    """Return the group of the same ranks for calls in order. Collective the first time.

    Args:
        group: of a process set.
    """
    if group not in _made:
        _made[group] = new_group_in_order(
            dist.get_process_group_ranks(group),
            timeout=group.timeout,
            use_local_synchronization=True,
        )
    return _made[group]


def free(group: ProcessGroup) -> None:
    """Destroy what `group_in_order` has made, if anything. Collective over `group`."""
    made = _made.pop(group, None)
    if made is not None:
        dist.destroy_process_group(made)

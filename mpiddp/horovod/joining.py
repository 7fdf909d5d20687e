"""Wait for ranks: those that have more data than others, and all of them."""

from __future__ import annotations

from typing import cast

from mpiddp.horovod import submitting
from mpiddp.horovod.handles import synchronize
from mpiddp.horovod.process_sets import ProcessSet, global_process_set

__all__ = ["barrier", "join"]


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so.

    Collective over all ranks. Until then this rank contributes zeros to the all-reduces of the
    others, whatever their op; averages are still over all ranks. All other operations of the
    others fail meanwhile.

    Args:
        device: accepted as in Horovod; the zeros are on the CPU.

    Returns:
        the rank that joined last.

    Raises:
        HorovodInternalError: Horovod ended on a rank that had not joined.
    """
    handle = submitting.without_tensors("join", global_process_set, lambda done: done.last_joined)
    return cast(int, synchronize(handle))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set are here. Collective over them.

    Raises:
        HorovodInternalError: this process is not in the set, or a rank has joined.
    """
    synchronize(submitting.without_tensors("barrier", process_set))

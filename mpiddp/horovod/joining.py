"""Wait for ranks: those that have more data than others, and all of them."""

from __future__ import annotations

import time
from typing import cast

from mpiddp.horovod import gradient_average, submitting
from mpiddp.horovod.handles import synchronize
from mpiddp.horovod.process_sets import ProcessSet, global_process_set

__all__ = ["barrier", "join"]

# Seconds between looks at the steps of other ranks: after a while without one, and at most.
_YIELD = 2e-3
_LONGEST_NAP = 1e-3


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so.

    Collective over all ranks. Until then this rank contributes zeros to the all-reduces of the
    others, whatever their op, and to the steps of their `DistributedOptimizer`s on the set of all
    ranks (but for those with op=Adasum); averages are still over all ranks. All other operations of
    the others fail meanwhile. Parameters of this rank stay as they are: broadcast them afterwards,
    from the rank that joined last.

    Args:
        device: accepted as in Horovod; the zeros are on the CPU.

    Returns:
        the rank that joined last.

    Raises:
        HorovodInternalError: Horovod ended on a rank that had not joined.
        RuntimeError: this rank has called backward and not step; or gradients could not be reduced.
    """
    steps = everything = gradient_average.averages_in_use(global_process_set.group)
    for step in steps:
        step.begin_shadow()
    handle = submitting.without_tensors(
        "join", global_process_set, lambda done: done.last_joined, sum(step.steps for step in steps)
    )
    idle_since = time.monotonic()
    while steps:
        ended = [(step, step.shadow()) for step in steps]
        for step, nobody in ended:
            if nobody is False:
                step.begin_shadow()
        steps = [step for step, nobody in ended if not nobody]
        now = time.monotonic()
        if any(nobody is not None for _, nobody in ended):
            idle_since = now
        elif now - idle_since < _YIELD:
            time.sleep(0)
        else:
            time.sleep(min((now - idle_since) / 10, _LONGEST_NAP))
    for step in everything:
        step.note_join()
    return cast(int, synchronize(handle))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set are here. Collective over them.

    Raises:
        ValueError: this process is not in the set.
        HorovodInternalError: a rank has joined.
    """
    synchronize(submitting.without_tensors("barrier", process_set))

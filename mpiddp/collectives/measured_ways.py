"""From how many bytes on the ranks of a node read each other's memory, as measured when they start.

Note [Measured ways]
~~~~~~~~~~~~~~~~~~~~
In memory that ranks share each byte is copied twice, by the ranks. Out of another rank's memory it
is copied once, by the kernel, which looks up each page. Which is faster depends on the machine: on
one with Intel's processors reading won from 128 KiB on, on one with AMD's it lost at every size, by
1.3 to 3 times. No table can know that, so the ranks try both when they start: on the longest first,
and on shorter ones as long as reading wins. All of a node take what the slowest of them has
measured, so they go the same way. Both ways have the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from mpiddp.collectives.node_memory import GROUPS, NodeMemory
from mpiddp.collectives.way_table import NEVER, DirectFrom, tries_to_read
from mpiddp.engine.engine import Engine
from mpiddp.engine.requests import Requests
from mpiddp.mpi import nodes
from mpiddp.system.kernels import ELEMENTS

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.collectives.group_memory import GroupMemory, MemoryPending

__all__ = ["first_of", "measure", "measured_alone"]

# Bytes of a rank's larger side. What is longer than the last goes as that does.
_SIZES = (256 << 10, 1 << 20, 4 << 20)
# The first of them is not counted: it finds the tensors as the other way has left them, in the
# caches of other cores.
_TIMES = 4
# What reading must win by: less is noise.
_MARGIN = 0.95
# Seconds to wait for other ranks, which are at work on the same.
_PATIENCE = 60.0


def measure(memory: NodeMemory, node: MPI.Comm, requests: Requests) -> DirectFrom:
    """Return which way is faster here, the same on all ranks of a node. Takes milliseconds.

    Collective over `node`.

    Args:
        memory: of these ranks, which can read each other's memory; it has no groups yet.
        node: the communicator that it was made for.
        requests: those of the process.

    Raises:
        RuntimeError: another rank has not come within a minute.
    """
    ranks = node.Get_size()
    group = memory.of_group(GROUPS - 1, ranks, node.Get_rank(), requests)
    group.at_once = True
    source, target = (torch.ones(_SIZES[-1] // 4, device="cpu") for _ in range(2))
    float32 = ELEMENTS[torch.float32]
    here, there = source.data_ptr(), target.data_ptr()

    def gather(size: int) -> MemoryPending:
        part = size // ranks
        return group.gather(here, [there + rank * part for rank in range(ranks)], part, None)

    def reduce_parts(size: int) -> MemoryPending:
        part = size // ranks // 4 * 4
        sources = [here + rank * part for rank in range(ranks)]
        return group.reduce_parts(sources, there, part, float32, 0, 1.0, None)

    def all_reduce(size: int) -> MemoryPending:
        return group.reduce(here, here, size, float32, 0, float(ranks), -1, None)

    try:
        result = DirectFrom(
            *(first_of(_compared(group, node, call)) for call in (gather, reduce_parts, all_reduce))
        )
    finally:
        group.close()
    node.Barrier()
    if node.Get_rank() == 0:
        group.clear()
    return result


def measured_alone(node: MPI.Comm) -> DirectFrom | None:
    """Return the same for the ranks of a node that make no group, for the doctor.

    Collective over `node`. None: they share no memory, or may not read each other's.
    """
    if node.Get_size() == 1:
        return DirectFrom()
    try:
        memory = NodeMemory(node, tries_to_read())
    except OSError:
        return None  # on all its ranks
    if not memory.is_readable:
        return None
    requests = Requests(Engine(threaded=False), crowded=nodes.is_crowded(node))
    return measure(memory, node, requests)


def first_of(times: Iterable[tuple[int, float, float]]) -> int:
    """Return from how many bytes on reading wins; `NEVER` if it does not. Not collective.

    Args:
        times: of sizes, the longest first: bytes, seconds of reading, and seconds of copying twice.
            Those after the first that does not win are not asked for.
    """
    first = NEVER
    for size, reading, copying in times:
        if reading > _MARGIN * copying:
            break
        first = size
    return first


def _compared(
    group: GroupMemory, node: MPI.Comm, call: Callable[[int], MemoryPending]
) -> Iterable[tuple[int, float, float]]:
    """Yield what `first_of` asks for. Collective over `node`, as far as it is asked for."""
    for size in reversed(_SIZES):
        seconds = []
        for least in (1, NEVER):
            group.read_directly(least, least, least)
            seconds.append(min([_seconds(node, group, call, size) for _ in range(_TIMES)][1:]))
        reading, copying = (max(all_of) for all_of in zip(*node.allgather(seconds), strict=True))
        yield size, reading, copying


def _seconds(
    node: MPI.Comm, group: GroupMemory, call: Callable[[int], MemoryPending], size: int
) -> float:
    ended = group.meet().wait(_PATIENCE)
    began = time.perf_counter()
    if not ended or not call(size).wait(_PATIENCE):
        raise RuntimeError(
            f"rank {node.Get_rank()} of {node.Get_size()} ranks of this node has waited "
            f"{_PATIENCE:g} s for the others, which start at the same time: one of them has died, "
            "or stands still. Start the job again"
        )
    return time.perf_counter() - began

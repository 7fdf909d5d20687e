"""Whether MPI moves a nonblocking all-reduce while nobody calls it.

If it does not, an all-reduce that a program starts during backward happens in its wait. mpiddp's
own gradients do not depend on it, see docs/explanation/thread.md; other code of a program may.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpiddp.diagnosis.measuring import meet
from mpiddp.findings import Finding

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Progress", "describe", "measure", "report"]

# The all-reduce grows until it takes so long, or is so large.
_LONG_SECONDS, _FIRST_BYTES, _MOST_BYTES = 0.03, 16 << 10, 16 << 20
# What the sockets of a connection may hold by themselves (net.ipv4.tcp_wmem of Linux).
_BUFFERS = 4 << 20
# Nobody calls MPI for so many times what the all-reduce takes.
_PAUSE = 3
# Above this part it has moved, up to that one it has not.
_MOVED, _STOOD = 0.8, 0.3


@dataclass(frozen=True)
class Progress:
    """What the slowest rank has seen.

    Attributes:
        size: of the all-reduce, in bytes.
        whole: how long it takes while all ranks wait for it, in seconds.
        left: how long it takes after a pause that was long enough for all of it.
    """

    size: int
    whole: float
    left: float


def report(world: MPI.Comm) -> list[Finding]:
    """Say whether MPI makes progress by itself. Collective."""
    if world.Get_size() == 1:
        return []
    return [describe(measure(world))]


def measure(world: MPI.Comm) -> Progress:
    """Return how long an all-reduce takes with a pause and without. Collective."""
    size = _FIRST_BYTES
    while True:
        # The first one opens connections.
        whole = [_slowest(world, size, 0.0) for _ in range(3)][1:]
        if min(whole) > _LONG_SECONDS or size == _MOST_BYTES:
            break
        size = min(_MOST_BYTES, 4 * size)
    pause = _PAUSE * max(whole)  # the same on all ranks
    left = [_slowest(world, size, pause) for _ in range(2)]
    return Progress(size, min(whole), min(left))


def _slowest(world: MPI.Comm, size: int, pause: float) -> float:
    """Return how long the last rank waits for an all-reduce after a pause."""
    from mpi4py import MPI

    gradients, sums = np.zeros(size // 4, np.float32), np.empty(size // 4, np.float32)
    meet(world)
    request = world.Iallreduce(gradients, sums)
    time.sleep(pause)
    start = time.perf_counter()
    request.Wait()
    took = time.perf_counter() - start
    return float(world.allreduce(took, op=MPI.MAX))


def describe(progress: Progress) -> Finding:
    """Return whether messages move by themselves. Not collective."""
    moved = max(0.0, 1 - progress.left / progress.whole)
    text = (
        f"{moved:.0%} of an MPI_Iallreduce of {progress.size / 1e6:.3g} MB "
        f"({progress.whole * 1e3:.3g} ms) moves while nobody calls MPI"
    )
    if moved > _STOOD and progress.size < _BUFFERS:
        return Finding(
            "ok",
            f"progress: not known: {text}, but the system's buffers take so few bytes, and the "
            f"link is too slow to try more",
        )
    if moved > _MOVED:
        return Finding("ok", f"progress: by itself: {text}")
    kind = "not by itself" if moved <= _STOOD else "by itself in part"
    return Finding("ok", f"progress: {kind}: {text}; mpiddp's thread calls it during backward")

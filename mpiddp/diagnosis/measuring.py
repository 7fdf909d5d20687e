"""How ranks wait for each other while the doctor measures: without taking a core from the others.

MPI's own blocking calls spin. On a machine with fewer cores than ranks they would be measured.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from statistics import median
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["SLOW", "finish", "meet", "slow_ones"]

# What has less than this part of what the others have is called slow: hosts and cables of one kind
# differ by some percent, and a measurement of half a second on a busy machine by some tens.
SLOW = 0.5

# A message of 4 MiB takes so long at 34 Gbit/s. Where it takes longer, naps do no harm: who naps
# runs again at once, and who spins or yields waits for its turn where others want its core.
_SPIN_SECONDS, _NAP_SECONDS = 1e-3, 2e-5

_Name = TypeVar("_Name", bound=Hashable)


def finish(*requests: MPI.Request) -> None:
    """Wait for messages while others may run on this core. Not collective."""
    waiting, start = list(requests), time.perf_counter()
    while waiting := [request for request in waiting if not request.Test()]:
        if time.perf_counter() - start > _SPIN_SECONDS:
            time.sleep(_NAP_SECONDS)


def meet(world: MPI.Comm) -> None:
    """Wait until all ranks are here, asleep meanwhile. Collective."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def slow_ones(rates: Mapping[_Name, float]) -> dict[_Name, float]:
    """Return what is slow beside the others, each with the median of these. Not collective.

    Args:
        rates: more is better. Of a single one nothing can be said.
    """
    found = {}
    for name, rate in rates.items():
        others = [other for each, other in rates.items() if each != name]
        if others and rate < SLOW * median(others):
            found[name] = median(others)
    return found

"""Which cores this process was given, and which of them suit a thread that works beside OpenMP's.

Note [OpenMP narrows the mask]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
With OMP_PROC_BIND or OMP_PLACES set, the OpenMP library ties the thread that loads it, mostly the
main thread, to the first of its places: one core. Threads that are made later inherit that mask,
and `os.sched_getaffinity` shows nothing else. The library made its places from the mask that it
found, so they show what the process was given.

Its functions are in the process's global table: torch loads its OpenMP library there, and whatever
else is found there first is what torch calls, too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Set

__all__ = ["are_spare", "available", "beside_openmp", "left_over"]


def available() -> set[int]:
    """Return the numbers of the cores that this process was given. Not collective.

    That is what the launcher and the operating system allow, see Note [OpenMP narrows the mask].
    """
    return os.sched_getaffinity(0).union(*_places())


def are_spare(count: int, ranks: int, threads: int) -> bool:
    """Return whether each rank's engine thread has a core that no other thread uses.

    Not collective.

    Args:
        count: cores of the ranks of a node.
        ranks: of the node.
        threads: of torch, in each.
    """
    return count >= ranks * (threads + 1)


def beside_openmp(threads: int) -> set[int]:
    """Return cores for a thread that works beside an OpenMP team; none: leave it where it is.

    Not collective. To be called on the team's master.

    Args:
        threads: of the team, with its master.
    """
    return left_over(_places(), os.sched_getaffinity(0), threads)


def left_over(places: list[set[int]], master: Set[int], threads: int) -> set[int]:
    """Return the cores that a team leaves over, else all but its master's. Not collective.

    The others of a team have pauses where the master is alone. Of several cores the kernel takes an
    idle one; so it does where the master is not tied to one core, and then the answer is none.

    Args:
        places: to which OpenMP ties threads, in its order; the team takes them one after the other
            from the master's on.
        master: cores of the master.
        threads: of the team, with its master.
    """
    if len(master) > 1 or master not in places:
        return set()
    first = places.index(set(master))
    unused = (places[first:] + places[:first])[threads:]
    return set().union(*unused).difference(master) or set().union(*places).difference(master)


def _places() -> list[set[int]]:
    """Return the places to which OpenMP ties threads; none if it ties none, or is not there."""
    openmp = ctypes.CDLL(None)
    try:
        count = openmp.omp_get_num_places()
    except AttributeError:
        return []
    places = []
    for place in range(count):
        cores = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
        openmp.omp_get_place_proc_ids(place, cores)
        places.append(set(cores))
    return places

"""Where the ranks run: cores and threads of each, how they are bound, and whether that is too much.

Note [What a rank may use]
~~~~~~~~~~~~~~~~~~~~~~~~~~
The mask of the main thread is not what a rank was given, see Note [OpenMP narrows the mask]: both
are looked at. More threads than cores is the most common fault of all, since torch starts as many
threads as there are cores, in every rank.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpiddp.findings import Finding
from mpiddp.rendezvous.world import get_topology
from mpiddp.system import cores

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Place", "describe", "report"]

_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Place:
    """What one rank has.

    Attributes:
        rank: in the world.
        node: number of its node.
        host: the node's name.
        given: the cores that the launcher and the system allow.
        main: those of its main thread, to which OpenMP may have tied it.
        threads: that torch computes with.
        asked: what OMP_NUM_THREADS says, None where it is unset.
        there: how many cores the node has, also such as this rank was not given; 0: not known.
    """

    rank: int
    node: int
    host: str
    given: frozenset[int]
    main: frozenset[int]
    threads: int
    asked: str | None = None
    there: int = 0


def report(world: MPI.Comm) -> list[Finding]:
    """Return where the ranks run, and what is wrong with it. Collective."""
    topology = get_topology()
    place = Place(
        rank=world.Get_rank(),
        node=topology.node_rank,
        host=socket.gethostname(),
        given=frozenset(cores.available()),
        main=frozenset(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        asked=os.environ.get(_THREADS),
        there=os.cpu_count() or 0,
    )
    return describe(world.allgather(place))


def describe(places: Sequence[Place]) -> list[Finding]:
    """Return what there is to say of all ranks, in their order. Not collective."""
    nodes: dict[int, list[Place]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place)
    return [
        _ranks(nodes),
        _binding(nodes),
        _threads(nodes),
        *_tied(nodes),
    ]


def _ranks(nodes: dict[int, list[Place]]) -> Finding:
    here = next(iter(nodes.values()))
    hosts = [ranks[0].host for ranks in nodes.values()]
    shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
    return Finding(
        "ok",
        f"ranks: {sum(map(len, nodes.values()))} on {_count(len(nodes), 'node')} ({shown}); "
        f"{len(here)} on this one, with {_count(len(_union(here)), 'core')}",
    )


def _binding(nodes: dict[int, list[Place]]) -> Finding:
    """Say how many cores a rank has, and whether others have the same ones."""
    words = dict.fromkeys(_binding_of_node(ranks) for ranks in nodes.values())
    return Finding("ok", f"cores: {'; on other nodes '.join(words)}")


def _binding_of_node(ranks: list[Place]) -> str:
    numbers = [len(place.given) for place in ranks]
    if len(ranks) == 1:
        return f"a rank has {_count(numbers[0], 'core')} and its node for itself"
    if sum(numbers) == len(_union(ranks)):
        return f"each rank is bound to {_range(numbers, 'core')} of its own"
    if len({place.given for place in ranks}) == 1:
        return f"no rank has any of its own, all {len(ranks)} share {_count(numbers[0], 'core')}"
    return f"each rank is bound to {_range(numbers, 'core')}, some of them to the same"


def _threads(nodes: dict[int, list[Place]]) -> Finding:
    """Say how many threads a rank has, and on which node they are more than its cores."""
    everyone = [place for ranks in nodes.values() for place in ranks]
    asked = everyone[0].asked
    told = f"{_THREADS} is unset" if asked is None else f"{_THREADS}={asked}"
    text = f"threads: {_range([place.threads for place in everyone], '')} a rank ({told})"
    # The fullest node counts, and of a node that is not full the rank that is.
    fullest = max(nodes.values(), key=lambda ranks: _sum(ranks) / len(_union(ranks)))
    count = len(_union(fullest))
    if _sum(fullest) > count:
        each = _range([place.threads for place in fullest], "thread")
        return Finding(
            "warning",
            f"{text}: {_count(len(fullest), 'rank')} x {each} on {_count(count, 'core')} of "
            f"{fullest[0].host} take turns, which makes every step slow",
            _fewer_threads(fullest, count),
        )
    for place in everyone:
        if place.threads > len(place.given):
            cores_ = _count(len(place.given), "core")
            return Finding(
                "warning",
                f"{text}: those of rank {place.rank} share the {cores_} that it is bound to, "
                f"although {place.host} has more",
                f"bind each rank to {place.threads} cores (Open MPI: mpirun --map-by "
                f"slot:PE={place.threads}; MPICH: mpiexec -bind-to core:{place.threads}; SLURM: "
                f"srun --cpus-per-task={place.threads}), or export "
                f"{_THREADS}={len(place.given)}",
            )
    return Finding("ok", text)


def _fewer_threads(ranks: list[Place], count: int) -> str:
    """Return what to do on a node with too many threads."""
    own = max(1, count // len(ranks))
    parts = []
    there = ranks[0].there
    if len(ranks) > count and there > count:
        parts.append(
            f"bind the ranks to other cores: the host has {there} (Open MPI: mpirun --bind-to "
            f"core; MPICH: mpiexec -bind-to core; SLURM: srun --cpu-bind=cores, or a larger "
            f"--cpus-per-task)"
        )
    if any(place.threads > own for place in ranks):
        parts.append(f"export {_THREADS}={own} (mpiddp run sets 1 where it is unset)")
    if len(ranks) > count:
        parts.append(
            f"start {_count(count, 'rank')} a node at most: with more, training is only tried out"
        )
    if len(ranks) <= count < there:
        parts.append("or let the launcher give the ranks more cores")
    return "; ".join(parts)


def _tied(nodes: dict[int, list[Place]]) -> Iterable[Finding]:
    """Say where OpenMP has tied the main threads of ranks to the same cores."""
    for ranks in nodes.values():
        tied = [place for place in ranks if place.main < place.given]
        common = len(frozenset().union(*(place.main for place in tied)))
        if common < len(tied) <= len(_union(ranks)):
            names = ", ".join(str(place.rank) for place in tied[:4])
            yield Finding(
                "warning",
                f"binding: OMP_PROC_BIND or OMP_PLACES ties the main threads of ranks {names} on "
                f"{ranks[0].host} to {_count(common, 'core')}",
                "bind each rank to cores of its own, or unset both",
            )
            return


def _union(ranks: list[Place]) -> frozenset[int]:
    return frozenset().union(*(place.given for place in ranks))


def _sum(ranks: list[Place]) -> int:
    return sum(place.threads for place in ranks)


def _range(numbers: Sequence[int], noun: str) -> str:
    least, most = min(numbers), max(numbers)
    if least == most:
        return _count(least, noun)
    return f"{least} to {_count(most, noun)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}" if noun else str(number)

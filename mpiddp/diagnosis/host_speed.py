"""How fast the hosts are while all ranks work: memory and arithmetic, and who is slow.

Every rank of a job waits for the slowest one, so a host that is throttled or that others use makes
the whole job slow, and nothing tells but a comparison. All ranks work at the same time, as in
training: the bandwidth of a node's memory is shared.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpiddp.diagnosis.measuring import meet, slow_ones
from mpiddp.findings import Finding
from mpiddp.rendezvous.world import get_topology
from mpiddp.system.caches import share_of_cache

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Speed", "describe", "measure", "report"]

COPY_SECONDS, MULTIPLY_SECONDS = 0.5, 0.4
# An array is so many times a rank's share of the caches, but not so long that ranks run out of
# memory: 64 of them take 8 GiB for a moment.
_CACHES, _LEAST_BYTES, _MOST_BYTES = 4, 8 << 20, 64 << 20
# Three matrices of this size lie in the cache of one core.
_ROWS = 192


@dataclass(frozen=True)
class Speed:
    """How fast one rank was.

    Attributes:
        rank: in the world.
        node: number of its node.
        host: the node's name.
        memory: bytes a second, read and written; 0 where there was not enough memory to try.
        arithmetic: floating-point operations a second, in float32.
    """

    rank: int
    node: int
    host: str
    memory: float
    arithmetic: float


def report(world: MPI.Comm) -> list[Finding]:
    """Measure all ranks together and say what is slow; on rank 0. Collective."""
    everyone = world.gather(measure(world))
    return describe(everyone) if everyone is not None else []


def measure(world: MPI.Comm) -> Speed:
    """Return how fast this rank is while all are at it. Collective."""
    topology = get_topology()
    size = min(_MOST_BYTES, max(_LEAST_BYTES, _CACHES * share_of_cache(1)))
    try:
        source, target = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        source.fill(1)  # zeros may be one page
        np.copyto(target, source)
    except MemoryError:
        source, target = np.zeros(0, np.uint8), np.zeros(0, np.uint8)
    meet(world)
    memory = _rate(lambda: np.copyto(target, source), COPY_SECONDS) * 2 * len(source)
    left, right = torch.ones(_ROWS, _ROWS, device="cpu"), torch.ones(_ROWS, _ROWS, device="cpu")
    out = torch.mm(left, right)
    meet(world)
    arithmetic = _rate(lambda: torch.mm(left, right, out=out), MULTIPLY_SECONDS) * 2 * _ROWS**3
    meet(world)
    return Speed(topology.rank, topology.node_rank, socket.gethostname(), memory, arithmetic)


def _rate(work: Callable[[], object], seconds: float) -> float:
    """Return how often a second something is done, pauses in which others run included."""
    times, start = 0, time.perf_counter()
    while (took := time.perf_counter() - start) < seconds:
        work()
        times += 1
    return times / took


def describe(speeds: Sequence[Speed]) -> list[Finding]:
    """Return what there is to say of all ranks. Not collective."""
    nodes: dict[int, list[Speed]] = {}
    for speed in speeds:
        nodes.setdefault(speed.node, []).append(speed)
    found = [_all_together(list(nodes.values()))]
    if scarce := [speed for speed in speeds if not speed.memory]:
        found.append(
            Finding(
                "warning",
                f"speed: rank {scarce[0].rank} on {scarce[0].host} has not the memory to measure",
                "see the lines on memory; raise the limit, or start fewer ranks a node",
            )
        )
    slow = {*_slow_hosts(nodes, found)}
    rest = {speed.rank: speed for speed in speeds if speed.node not in slow}
    for rank, others in slow_ones({rank: each.arithmetic for rank, each in rest.items()}).items():
        found.append(
            Finding(
                "warning",
                f"slow rank {rank} on {rest[rank].host}: it computes at "
                f"{_operations(rest[rank].arithmetic)}, the median of the others is "
                f"{_operations(others)}",
                "look which other rank or program has the same cores (the lines on cores; top)",
            )
        )
    return found


def _all_together(nodes: Sequence[Sequence[Speed]]) -> Finding:
    memory = median(sum(speed.memory for speed in ranks) for ranks in nodes)
    arithmetic = median(sum(speed.arithmetic for speed in ranks) for ranks in nodes)
    ranks = len(nodes[0])
    who = f"{ranks} ranks of a node together" if ranks > 1 else "the rank of a node"
    more = f" (median of {len(nodes)} nodes)" if len(nodes) > 1 else ""
    return Finding(
        "ok",
        f"speed: {who}: memory {_memory(memory)}, read and written; arithmetic "
        f"{_operations(arithmetic)}{more}",
    )


def _slow_hosts(nodes: dict[int, list[Speed]], found: list[Finding]) -> list[int]:
    """Add what is slow to the findings, and return the numbers of these nodes."""
    slow: dict[int, None] = {}
    for what, name, show in (
        ("copy memory at", "memory", _memory),
        ("compute at", "arithmetic", _operations),
    ):
        # Only beside hosts with as many ranks: these share the memory.
        for count in {len(ranks) for ranks in nodes.values()}:
            rates = {
                node: sum(getattr(speed, name) for speed in ranks)
                for node, ranks in nodes.items()
                if len(ranks) == count
            }
            for node, others in slow_ones(rates).items():
                host = nodes[node][0].host
                slow[node] = None
                found.append(
                    Finding(
                        "warning",
                        f"slow host {host}: its ranks {what} {show(rates[node])}, the median of "
                        f"the other nodes is {show(others)}",
                        f"look for other programs, limits of its container and its temperature on "
                        f"{host} (top; dmesg), or leave it out: all ranks wait for it",
                    )
                )
    return list(slow)


def _memory(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def _operations(rate: float) -> str:
    return f"{rate / 1e9:.3g} GFLOP/s"

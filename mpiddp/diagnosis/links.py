"""Measure messages inside each node, and between each node and the next one.

Note [Which pairs, and when]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The nodes stand in a ring, and each measures with both of its neighbours: so a slow node has two
slow pairs, and a slow cable between two switches one. All pairs of a round measure at the same
time. An even number of nodes needs two rounds, an odd one three, however many nodes there are.
Between two nodes every rank sends to one of the other node, as lanes do, and both ways at once, as
gradients travel: one rank alone may not fill a fast link. The latency is measured by the first
ranks alone, before.

The lower rank decides when a message is long enough, and when to stop: it sends the size ahead. No
message is so long that a link of 1 Mbit/s takes much more time than a fast one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpiddp.diagnosis.interfaces import Interface, carrier, interfaces
from mpiddp.diagnosis.measuring import finish, meet
from mpiddp.rendezvous.world import get_topology

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Link", "measure", "rounds"]

# A pair pings so often or so long, and streams so long.
PINGS, PING_SECONDS, STREAM_SECONDS = 400, 0.1, 0.4
# The first pings open connections.
_UNCOUNTED = 5
# Messages grow until one takes so long, or is so long: larger than what MPIs send unasked.
_LONG_SECONDS, _FIRST_BYTES, _MOST_BYTES = 0.02, 4 << 10, 4 << 20
_TAG = 20


@dataclass(frozen=True)
class Link:
    """What messages between two ranks, or all ranks of two nodes, get.

    Attributes:
        hosts: the one or two nodes, by name.
        latency: of an empty message, in seconds, at best.
        rate: bytes a second in each direction, of all ranks together.
        carriers: the interface that has carried them on each node, "" if none is seen to.
        interfaces: of each node.
    """

    hosts: tuple[str, ...]
    latency: float
    rate: float
    carriers: tuple[str, ...] = ()
    interfaces: tuple[dict[str, Interface], ...] = ()


@dataclass(frozen=True)
class _Side:
    """What one rank has seen of a pair in a round."""

    pair: tuple[int, int]
    node: int
    host: str
    is_first: bool
    latency: float
    rate: float
    carrier: str
    interfaces: dict[str, Interface]


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return which nodes measure with which, round by round. Not collective."""
    even = [(node, node + 1) for node in range(0, nodes - 1, 2)]
    odd = [(node, node + 1) for node in range(1, nodes - 1, 2)]
    closing = [(nodes - 1, 0)] if nodes > 2 else []
    found = [even, odd + closing] if nodes % 2 == 0 else [even, odd, closing]
    return [pairs for pairs in found if pairs]


def measure(world: MPI.Comm) -> list[Link]:
    """Return the links inside nodes, then those between them; none but on rank 0. Collective."""
    node = get_topology().node_rank
    nodes: dict[int, list[int]] = {}
    for rank, number in enumerate(world.allgather(node)):
        nodes.setdefault(number, []).append(rank)
    seen: list[_Side | None] = []
    if any(len(ranks) > 1 for ranks in nodes.values()):
        seen.append(_inside(world, node, nodes[node]))
    for pairs in rounds(len(nodes)):
        seen.append(_between(world, node, nodes, pairs))
    meet(world)
    everyone = world.gather([side for side in seen if side is not None])
    return _put_together(everyone) if everyone is not None else []


def _inside(world: MPI.Comm, node: int, ranks: Sequence[int]) -> _Side | None:
    """Let the first two ranks of each node measure."""
    peers = {ranks[0]: ranks[1], ranks[1]: ranks[0]} if len(ranks) > 1 else {}
    return _measure(world, (node, node), peers, True)


def _between(
    world: MPI.Comm, node: int, nodes: dict[int, list[int]], pairs: Sequence[tuple[int, int]]
) -> _Side | None:
    """Let all ranks of the nodes of each pair measure, of the larger node as many."""
    pair = next((each for each in pairs if node in each), (node, node))
    peers = {}
    if pair[0] != pair[1]:
        lanes = list(zip(nodes[pair[0]], nodes[pair[1]], strict=False))
        peers = dict(lanes) | {second: first for first, second in lanes}
    return _measure(world, pair, peers, world.Get_rank() == nodes[node][0])


def _measure(
    world: MPI.Comm, pair: tuple[int, int], peers: dict[int, int], pings: bool
) -> _Side | None:
    """Return what this rank sees of its pair, None if it has none in this round. Collective."""
    rank = world.Get_rank()
    peer = peers.get(rank)
    latency, rate, sent = 0.0, 0.0, 0.0
    meet(world)
    if peer is not None and pings:
        latency = _ping(world, peer) if rank < peer else _answer(world, peer)
    meet(world)
    before = interfaces()
    if peer is not None:
        rate, sent = _stream(world, peer)
    after = interfaces()
    meet(world)
    if peer is None:
        return None
    return _Side(
        pair=pair,
        node=get_topology().node_rank,
        host=socket.gethostname(),
        is_first=rank < peer,
        latency=latency,
        rate=rate,
        carrier=carrier(before, after, sent),
        interfaces=after,
    )


def _ping(world: MPI.Comm, peer: int) -> float:
    """Return how long an empty message takes: the quickest, others may wait for a core."""
    word = np.zeros(1)
    seconds: list[float] = []
    start = time.perf_counter()
    while len(seconds) < _UNCOUNTED + 2 or (
        len(seconds) < PINGS and time.perf_counter() - start < PING_SECONDS
    ):
        begun = time.perf_counter()
        finish(world.Isend(word, peer, _TAG))
        finish(world.Irecv(word, peer, _TAG))
        seconds.append((time.perf_counter() - begun) / 2)
    finish(world.Isend(np.ones(1), peer, _TAG))
    return min(seconds[_UNCOUNTED:])


def _answer(world: MPI.Comm, peer: int) -> float:
    word = np.zeros(1)
    while True:
        finish(world.Irecv(word, peer, _TAG))
        if word[0]:
            return 0.0
        finish(world.Isend(word, peer, _TAG))


def _stream(world: MPI.Comm, peer: int) -> tuple[float, float]:
    """Return the rate of long messages both ways, in bytes a second, and how much was sent."""
    leads = world.Get_rank() < peer
    size, sent, bytes_, seconds = np.array([_FIRST_BYTES]), 0.0, 0.0, 0.0
    out, into = np.zeros(_MOST_BYTES, np.uint8), np.zeros(_MOST_BYTES, np.uint8)
    is_grown, start = False, time.perf_counter()
    while True:
        if leads:
            finish(world.Isend(size, peer, _TAG))
        else:
            finish(world.Irecv(size, peer, _TAG))
        length = int(size[0])
        if length == 0:
            return (bytes_ / seconds if seconds else 0.0), sent
        begun = time.perf_counter()
        finish(
            world.Irecv(into[:length], peer, _TAG + 1), world.Isend(out[:length], peer, _TAG + 1)
        )
        took = time.perf_counter() - begun
        sent += length
        if leads:
            is_late = time.perf_counter() - start > STREAM_SECONDS
            if is_grown or is_late:
                bytes_, seconds = bytes_ + length, seconds + took
            if not is_grown:
                is_grown = took > _LONG_SECONDS or length == _MOST_BYTES
                size[0] = length if is_grown else 4 * length
            if is_late:
                size[0] = 0


def _put_together(everyone: Sequence[Sequence[_Side]]) -> list[Link]:
    """Return a link for each pair, of what its ranks have seen."""
    pairs: dict[tuple[int, int], list[_Side]] = {}
    for sides in everyone:
        for side in sides:
            pairs.setdefault(side.pair, []).append(side)
    found = []
    for pair, sides in sorted(pairs.items(), key=lambda each: each[0][0] != each[0][1]):
        first = [side for side in sides if side.is_first]
        # Of each node a rank that has seen which interface it was.
        ends = [
            max((side for side in sides if side.node == node), key=lambda side: side.carrier)
            for node in dict.fromkeys(pair)
        ]
        found.append(
            Link(
                tuple(side.host for side in ends),
                max(side.latency for side in first),
                sum(side.rate for side in first),
                tuple(side.carrier for side in ends),
                tuple(side.interfaces for side in ends),
            )
        )
    return found

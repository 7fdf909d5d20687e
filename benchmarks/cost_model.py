"""Predict a training step from the machine: latency, bandwidth, ranks and cores. No MPI, no torch.

Five ways to average the gradients are modelled, all overlapped with backward bucket by bucket:

- flat: MPI_Iallreduce of chunks over all ranks (``transport="mpi"``);
- hierarchical: sum in the node's memory, an MPI_Iallreduce a lane between nodes, write back;
- direct: the same, but between nodes each node gets all copies of its slice of a chunk
  (MPI_Ialltoallv), adds them, and hands its means round (MPI_Iallgather);
- two-level: that inside groups of nodes, and again across groups;
- ring: over all ranks, one bucket after another, as Gloo and NCCL do.

direct and two-level send 16-bit gradients as they are; flat and hierarchical widen them.

scaling.md has the formulas, their sources, and how far they are from measured steps. Sizes are in
bytes, times in seconds, bandwidths in bytes a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpiddp.transports.wire_choice import groups_of

# What torch's class cuts gradients into: the first bucket and all others.
FIRST_BUCKET = 1 << 20
BUCKET = 25 << 20
# What the transports cut buckets into, and how many chunks of a lane are in flight
# (mpiddp/transports/choice.py).
FLAT_CHUNK = 1 << 20
LANE_CHUNK = 1 << 20
WINDOW = 2
# The engine thread naps up to 200 us between two looks at MPI (cython/engine/engine.pyx), so a
# message lies half of that on average before anybody notices.
NAP = 100e-6

ALGORITHMS = ("flat", "hierarchical", "direct", "two-level", "ring")
# How a lane's chunks travel, as wire_choice.py calls it and as it is called here.
WIRES = {"iallreduce": "hierarchical", "direct": "direct", "two-level": "two-level"}


@dataclass(frozen=True)
class Machine:
    """What the prediction knows about a cluster of equal nodes.

    Attributes:
        link: bandwidth of a node's link, each way; all ranks of the node share it.
        headers: bytes on the wire for each byte of payload.
        latency_between: of a short message between nodes.
        latency_inside: of a short message between ranks of a node.
        rendezvous: what a message above `eager_limit` waits longer for its receiver.
        eager_limit: the longest message that is sent without asking its receiver.
        overhead: core time that each message costs its rank.
        rank_copy: bytes that one rank copies in a second while the others copy too.
        rank_sum: the same for bytes added to others: 1 / gamma.
        node_memory: bytes that all ranks of a node together read and write in a second.
        stack: bytes a second, each way, that a node's cores push through the network's software
            when they do nothing else; infinite where the network card does it.
        cores: of a node that are there for communication.
        nap: how long a message lies unnoticed while backward runs. After backward it is noticed
            at once.
    """

    link: float
    headers: float = 1.05
    latency_between: float = 30e-6
    latency_inside: float = 1e-6
    rendezvous: float = 0.0
    eager_limit: int = 1 << 16
    overhead: float = 0.0
    rank_copy: float = 5e9
    rank_sum: float = 5e9
    node_memory: float = math.inf
    stack: float = math.inf
    cores: float = math.inf
    nap: float = NAP


@dataclass(frozen=True)
class Traffic:
    """What one all-reduce asks of one node.

    Attributes:
        rounds_between: sizes of the messages between nodes that wait for one another.
        rounds_inside: how many messages do so inside a node.
        messages: that a rank sends between nodes, also those that go at once.
        between: bytes that cross the node's link, each way.
        sequence: bytes that cross it one after another; more than `between` where the link
            idles in one direction meanwhile.
        copied: bytes that the node's ranks copy, each copy counted.
        summed: bytes that the node's ranks add to others.
        workers: ranks of the node that copy and sum.
    """

    rounds_between: tuple[float, ...]
    rounds_inside: int
    messages: int
    between: float
    sequence: float
    copied: float
    summed: float
    workers: float


@dataclass(frozen=True)
class Cost:
    """How long one bucket takes.

    Attributes:
        occupied: the next bucket can start so much later.
        tail: the bucket is finished so much after that.
    """

    occupied: float
    tail: float

    @property
    def total(self) -> float:
        """The time of a bucket by itself."""
        return self.occupied + self.tail


NOTHING = Cost(0.0, 0.0)


def rounds(ranks: int) -> int:
    """Return how often `ranks` can be halved, rounded up."""
    return (ranks - 1).bit_length()


def tree_traffic(size: float, nodes: int, ranks: int) -> Traffic:
    """Return the traffic of a reduction and a broadcast along a binomial tree.

    What Open MPI's MPI_Iallreduce does with fewer than 4 ranks. The root's link is the busiest.
    """
    between, inside = rounds(nodes), rounds(ranks)
    return Traffic(
        rounds_between=2 * between * (size,),
        rounds_inside=2 * inside,
        messages=2 * between,
        between=between * size,
        sequence=2 * between * size,
        copied=4 * (ranks - 1) * size + ranks * size,
        summed=(ranks - 1 + between) * size,
        workers=ranks,
    )


def halving_traffic(size: float, nodes: int, ranks: int) -> Traffic:
    """Return the traffic of Rabenseifner's algorithm: recursive halving, then doubling.

    Neighbours are met first: ranks of a node exchange halves, quarters and so on, and what is
    left goes between nodes. With a number of ranks that is no power of two, those too many give
    their all to a neighbour before and get the sum after.
    """
    everyone = nodes * ranks
    inside = 2 * (1 - 1 / ranks) * size
    between = 2 * (1 - 1 / nodes) * size
    rounds_between = 2 * tuple(size / ranks / 2**k for k in range(1, rounds(nodes) + 1))
    rounds_inside = 2 * rounds(ranks)
    sequence = between
    copied = 2 * inside * ranks
    if everyone & (everyone - 1):
        if ranks > 1:
            rounds_inside += 2
            copied += 2 * size * ranks
        else:
            rounds_between += (size, size)
            sequence += 2 * size
            between += size
    return Traffic(
        rounds_between=rounds_between,
        rounds_inside=rounds_inside,
        messages=len(rounds_between),
        between=between,
        sequence=sequence,
        copied=copied + ranks * size,
        summed=(1 - 1 / everyone) * size * ranks,
        workers=ranks,
    )


def exchange_traffic(size: float, nodes: int, group: int) -> Traffic:
    """Return the traffic of a chunk exchanged in groups of nodes, and then across groups.

    One group of all nodes is the direct exchange. The messages of a round go all at once.
    """
    groups = nodes // group
    between = 2 * (1 - 1 / nodes) * size
    return Traffic(
        rounds_between=2 * (size / group,) + (2 * (size / nodes,) if groups > 1 else ()),
        rounds_inside=0,
        messages=2 * (group - 1) + 2 * (groups - 1),
        between=between,
        sequence=between,
        copied=0.0,
        summed=(1 - 1 / nodes) * size,
        workers=1,
    )


def lanes_traffic(
    size: float,
    nodes: int,
    ranks: int,
    lanes: float,
    *,
    wire: str = "hierarchical",
    element_bytes: int = 4,
    trees: bool = False,
) -> Traffic:
    """Return the traffic of one chunk of one of `lanes` lanes.

    The rank that drives the lane adds the chunks of its node, and writes the mean to all. Elements
    of 16 bits are added as fast as those of float32, so at half the bytes a second.
    """
    widened = 2 if element_bytes == 2 else 1
    group = groups_of(nodes) if wire == "two-level" else None
    if wire == "hierarchical":
        across = (tree_traffic if trees else halving_traffic)(widened * size, nodes, 1)
        own = widened * size
    else:
        across, own = exchange_traffic(size, nodes, group or nodes), size
    summed = across.summed if wire == "hierarchical" else widened * across.summed
    return replace(
        across,
        rounds_inside=1 if ranks > 1 else 0,
        # With one rank a node MPI sends from the bucket.
        copied=(own if ranks > 1 else 0.0) + ranks * size,
        summed=widened * (ranks - 1) * size + summed,
        workers=lanes,
    )


def ring_traffic(size: float, nodes: int, ranks: int) -> Traffic:
    """Return the traffic of a ring over all ranks, the ranks of a node side by side in it."""
    everyone = nodes * ranks
    passed = 2 * (1 - 1 / everyone) * size
    hops = ranks if nodes == 1 else ranks - 1
    steps = 2 * (everyone - 1)
    return Traffic(
        rounds_between=(size / everyone,) * (steps if nodes > 1 else 0),
        rounds_inside=0 if nodes > 1 else steps,
        messages=steps if nodes > 1 else 0,
        between=passed if nodes > 1 else 0.0,
        sequence=passed if nodes > 1 else 0.0,
        copied=2 * passed * hops + ranks * size,
        summed=(1 - 1 / everyone) * size * ranks,
        workers=ranks,
    )


def work_seconds(machine: Machine, traffic: Traffic) -> float:
    """Return how long copies and sums keep the cores of a node busy."""
    at_once = max(min(machine.cores, traffic.workers), 1e-9)
    by_rank = (traffic.copied / machine.rank_copy + traffic.summed / machine.rank_sum) / at_once
    touched = 2 * traffic.copied + 3 * traffic.summed
    return max(by_rank, touched / machine.node_memory)


def busy_seconds(machine: Machine, traffic: Traffic, lanes: float = 1) -> float:
    """Return how long the busiest part of a node is busy: its link, or its cores."""
    messages = traffic.messages + traffic.rounds_inside
    cores = (
        work_seconds(machine, traffic)
        + traffic.between / machine.stack
        + messages * machine.overhead / lanes
    )
    return max(traffic.between * machine.headers / machine.link, cores)


def asking_rounds(machine: Machine, traffic: Traffic) -> int:
    """Return how many messages between nodes, one after another, ask their receiver first."""
    return sum(size > machine.eager_limit for size in traffic.rounds_between)


def latency_seconds(machine: Machine, traffic: Traffic, nap: float, lanes: float = 1) -> float:
    """Return how long an all-reduce takes that has the node for itself.

    Args:
        machine: where it runs.
        traffic: what it does.
        nap: how long each message lies unnoticed.
        lanes: the ranks of a node that share its work; one lane has one rank's share.
    """
    waits = len(traffic.rounds_between) * (machine.latency_between + nap)
    waits += traffic.rounds_inside * (machine.latency_inside + nap)
    waits += (traffic.messages + traffic.rounds_inside) * machine.overhead
    # The question, the answer and the data: each lies until somebody looks.
    waits += asking_rounds(machine, traffic) * (machine.rendezvous + 2 * nap)
    wire = traffic.sequence * max(machine.headers / machine.link, 1 / machine.stack)
    return waits + wire + lanes * work_seconds(machine, traffic)


def pipelined(
    machine: Machine,
    whole: float,
    chunk: float,
    traffic: Traffic,
    lanes: float,
    window: int,
    nap: float,
) -> Cost:
    """Return the cost of `whole` bytes that go in chunks, `window` of them in flight a lane.

    A chunk leaves the pipeline each time the busiest part of the node is done with it, or, if
    that is longer, each time that one of those in flight has gone through all its rounds.
    """
    chunks = whole / chunk
    latency = latency_seconds(machine, traffic, nap, lanes)
    in_flight = min(lanes * window, max(chunks, 1.0))
    slot = max(busy_seconds(machine, traffic, lanes), latency / in_flight)
    occupied = chunks * slot
    return Cost(occupied, max(latency - min(slot, occupied), 0.0))


def flat(
    machine: Machine,
    size: float,
    nodes: int,
    ranks: int,
    *,
    nap: float = 0.0,
    trees: bool = False,
    element_bytes: int = 4,
    chunk: float = FLAT_CHUNK,
    window: int = WINDOW,
) -> Cost:
    """Return the cost of `size` bytes in an MPI_Iallreduce a chunk over all ranks.

    Args:
        machine: where it runs.
        size: of the bucket.
        nodes: how many.
        ranks: of each node.
        nap: how long a message lies unnoticed.
        trees: whether MPI uses a binomial tree below 4 ranks, as Open MPI does.
        element_bytes: of an element of the gradients; 2 is widened to 4.
        chunk: what the bucket is cut into.
        window: chunks in flight.
    """
    if nodes * ranks == 1 or size == 0:
        return NOTHING
    if element_bytes == 2:
        size *= 2
    part = min(size, chunk)
    tree = trees and nodes * ranks < 4
    traffic = (tree_traffic if tree else halving_traffic)(part, nodes, ranks)
    return pipelined(machine, size, part, traffic, 1, window, nap)


def hierarchical(
    machine: Machine,
    size: float,
    nodes: int,
    ranks: int,
    *,
    nap: float = 0.0,
    trees: bool = False,
    wire: str = "hierarchical",
    element_bytes: int = 4,
    chunk: float = LANE_CHUNK,
    window: int = WINDOW,
) -> Cost:
    """Return the cost of `size` bytes reduced in each node and in lanes between nodes.

    Arguments as for `flat`, and `wire`, how lanes travel: "hierarchical", "direct" or "two-level",
    which is direct where the nodes make no groups. With one rank a node there is nothing to reduce
    in it, and hierarchical is flat; on one node there are no lanes.
    """
    if nodes * ranks == 1 or size == 0:
        return NOTHING
    if ranks == 1 and wire == "hierarchical":
        return flat(
            machine,
            size,
            nodes,
            1,
            nap=nap,
            trees=trees,
            element_bytes=element_bytes,
            window=window,
        )
    if nodes == 1:
        # Every rank adds its part of all buckets and writes the mean to all of them.
        summed = (2 if element_bytes == 2 else 1) * (ranks - 1) * size
        traffic = Traffic((), 2, 0, 0.0, 0.0, ranks * size, summed, ranks)
        return Cost(latency_seconds(machine, traffic, 0.0), 0.0)
    # A chunk is as long as sent, and widened it is.
    part = min(size, chunk / 2 if wire == "hierarchical" and element_bytes == 2 else chunk)
    lanes = min(ranks, size / part)
    traffic = lanes_traffic(
        part,
        nodes,
        ranks,
        lanes,
        wire=wire,
        element_bytes=element_bytes,
        trees=trees and nodes < 4,
    )
    return pipelined(machine, size, part, traffic, lanes, window, nap)


def ring(machine: Machine, size: float, nodes: int, ranks: int) -> Cost:
    """Return the cost of `size` bytes in one ring over all ranks.

    Gloo's and NCCL's threads do not nap, they send without asking, and they cut what they pass on
    in two or more, so that the wire works while they add.
    """
    if nodes * ranks == 1 or size == 0:
        return NOTHING
    traffic = ring_traffic(size, nodes, ranks)
    waits = traffic.messages * (machine.latency_between + machine.overhead)
    waits += traffic.rounds_inside * (machine.latency_inside + machine.overhead)
    without_messages = replace(machine, overhead=0.0)
    return Cost(waits + busy_seconds(without_messages, traffic), 0.0)


def bucket_sizes(
    gradients: Sequence[float], first: float = FIRST_BUCKET, limit: float = BUCKET
) -> list[float]:
    """Return the sizes of the buckets, from those of the gradients in the order they come.

    A bucket is closed by the gradient that reaches its limit.
    """
    sizes: list[float] = []
    filled = 0.0
    for gradient in gradients:
        filled += gradient
        if filled >= (limit if sizes else first):
            sizes.append(filled)
            filled = 0.0
    return sizes + [filled] if filled else sizes


def end_of(start: float, napping: float, awake: float, backward_ends: float) -> float:
    """Return when something ends that takes `napping` during backward and `awake` after it."""
    if start >= backward_ends or napping <= 0:
        return start + awake
    if start + napping <= backward_ends:
        return start + napping
    left = 1 - (backward_ends - start) / napping
    return backward_ends + left * awake


def step_seconds(
    machine: Machine,
    algorithm: str,
    buckets: Sequence[float],
    nodes: int,
    ranks: int,
    forward: float,
    backward: float,
    *,
    trees: bool = False,
    element_bytes: int = 4,
) -> float:
    """Return the time of a training step.

    A bucket is ready when its share of backward is over, and goes when the one before it has
    left the wire. The step ends with the last bucket or with backward, whichever is later.

    Args:
        machine: where it runs.
        algorithm: one of `ALGORITHMS`.
        buckets: sizes of the buckets, in the order they are filled.
        nodes: how many.
        ranks: of each node.
        forward: seconds before the first gradient, and of everything else that is not backward.
        backward: seconds of backward without synchronisation. The copies of gradients into
            buckets are added here.
        trees: whether MPI uses a binomial tree below 4 ranks, as Open MPI does.
        element_bytes: of an element of the buckets.
    """
    total = sum(buckets)
    if nodes * ranks > 1:
        backward += total / machine.rank_copy * max(ranks / machine.cores, 1)
    backward_ends = forward + backward
    end = backward_ends
    wire_free = filled = 0.0
    for size in buckets:
        filled += size
        ready = forward + backward * filled / total
        start = max(ready, wire_free)
        napping, awake = (
            bucket_cost(machine, algorithm, size, nodes, ranks, nap, trees, element_bytes)
            for nap in (machine.nap, 0.0)
        )
        wire_free = end_of(start, napping.occupied, awake.occupied, backward_ends)
        end = max(end, end_of(wire_free, napping.tail, awake.tail, backward_ends))
    return end


def bucket_cost(
    machine: Machine,
    algorithm: str,
    size: float,
    nodes: int,
    ranks: int,
    nap: float,
    trees: bool = False,
    element_bytes: int = 4,
) -> Cost:
    """Return the cost of one bucket.

    Raises:
        ValueError: there is no such algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
    if algorithm == "ring":
        return ring(machine, size, nodes, ranks)
    known = {"nap": nap, "trees": trees, "element_bytes": element_bytes}
    if algorithm == "flat":
        return flat(machine, size, nodes, ranks, **known)
    return hierarchical(machine, size, nodes, ranks, wire=algorithm, **known)

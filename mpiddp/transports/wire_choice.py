"""Choose how a chunk travels between nodes: in one exchange, in two levels, or by MPI_Iallreduce.

Note [Which way]
~~~~~~~~~~~~~~~~~
Of H nodes, each sends 2 (H - 1) / H of a chunk over its link in all three ways. They differ in how
many messages wait for one another, and in how many there are at all:

    direct       2 rounds, 2 (H - 1) messages: a slice to every other node, and a mean to each
    two-level    4 rounds, 2 (g - 1) + 2 (H / g - 1) messages, in groups of g nodes
    iallreduce   2 log2 H rounds of one message each, 2 more where H is no power of two

MPI_Iallreduce cannot add 16-bit elements, so they are widened: it sends twice as much. Yet for
small chunks on hundreds of nodes without groups, it may cost least.

`_cost` counts this for a chunk by itself, while nobody naps, as after backward, where a step sees
it. Its unit is the latency of a message. In that unit the two clusters of benchmarks/scaling.py
(10 Gbit/s of TCP, 200 Gbit/s of InfiniBand; assumed, not measured) are alike: a message costs its
rank 0.12 and 0.15 of its latency, and the link carries 30 and 50 KB in one. So one choice does for
both: with 8 ranks a node it costs at most 10 % more than the best that benchmarks/cost_model.py
knows (tests/project/test_cost_model.py). For powers of two and chunks of 512 KiB, direct is taken
up to 32 nodes and two-level beyond; for short chunks, two-level from 16 on and iallreduce at 2048.

Left out are switches that many senders at once overload, and the memory of a connection to each
node. With one rank a node on InfiniBand, 16-bit gradients and chunks of 1 MiB, the choice may cost
a third more than iallreduce in that model.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DIRECT", "IALLREDUCE", "TWO_LEVEL", "WAYS", "Way", "choose", "groups_of", "thresholds"]

DIRECT, TWO_LEVEL, IALLREDUCE = WAYS = ("direct", "two-level", "iallreduce")

# In latencies of a message between nodes: the core time of a message, and what one waits longer
# for its receiver where it is longer than that limit in bytes.
MESSAGE = 0.134
RENDEZVOUS = 2.0
EAGER_BYTES = 64 << 10
# What the link carries in one latency.
BYTES_A_LATENCY = 30_000


@dataclass(frozen=True)
class Way:
    """How chunks of some size travel between nodes.

    Attributes:
        name: one of `WAYS`.
        group: nodes that exchange slices with one another at first; all nodes unless in two levels.
        reason: why, in words for users.
    """

    name: str
    group: int
    reason: str


def groups_of(nodes: int) -> int | None:
    """Return how many nodes a group has in two levels, None where there are no groups.

    It is the divisor of `nodes` next to its square root, at most that, and more than 1. Not
    collective.
    """
    small = (size for size in range(2, int(nodes**0.5) + 1) if nodes % size == 0)
    return max(small, default=None)


def choose(
    nodes: int, chunk_bytes: int, element_bytes: int, override: str | None, called: str = "nodes"
) -> Way:
    """Return how a chunk travels, see Note [Which way]. Not collective.

    Args:
        nodes: how many, at least 2.
        chunk_bytes: of the gradients, in their own type.
        element_bytes: of an element of that type; 2 is added in float32.
        override: one of `WAYS` to ask for it; None or "auto" chooses.
        called: what errors call the nodes: ranks where each of them sends for itself.

    Raises:
        ValueError: "two-level" is asked for where the nodes make no groups of equal size.
    """
    group = groups_of(nodes)
    possible = {DIRECT: nodes, IALLREDUCE: nodes}
    if group is not None:
        possible = {DIRECT: nodes, TWO_LEVEL: group, IALLREDUCE: nodes}
    if override not in (None, "auto"):
        if override not in possible:
            raise ValueError(
                f"MPIDDP_WIRE is {override}, but {nodes} {called} make no groups of equal size "
                f"with two or more each; take another number of {called}, or auto"
            )
        return Way(override, possible[override], "asked for")
    costs = {
        name: _cost(name, size, nodes, chunk_bytes, element_bytes)
        for name, size in possible.items()
    }
    best, *others = sorted(costs, key=lambda name: costs[name])
    reason = f"costs {costs[best]:.1f} latencies of a message; " + ", ".join(
        f"{name} {costs[name]:.1f}" for name in others
    )
    if best == IALLREDUCE and element_bytes == 2:
        reason += "; 16 bits travel as 32, but there are fewer messages"
    return Way(best, possible[best], reason)


def thresholds(
    nodes: int, element_bytes: int, largest: int, override: str | None, called: str = "nodes"
) -> list[tuple[int, Way]]:
    """Return which way is taken from which chunk size on, as a table to look sizes up in.

    The last entry whose size is not above the chunk's holds. The first is of size 0; the others
    are powers of two, in bytes of the gradients' own type. Not collective.

    Args:
        nodes: how many, at least 2.
        element_bytes: of an element.
        largest: chunk in bytes.
        override: as for `choose`.
        called: as for `choose`.

    Raises:
        ValueError: as `choose` does.
    """
    table: list[tuple[int, Way]] = []
    for size in [0] + [1 << power for power in range(largest.bit_length())]:
        way = choose(nodes, size, element_bytes, override, called)
        if not table or way.name != table[-1][1].name:
            table.append((size, way))
    return table


def _cost(name: str, group: int, nodes: int, size: int, element_bytes: int) -> float:
    """Return what a chunk of `size` bytes costs, in latencies of a message."""
    crossing = 2 * (1 - 1 / nodes) * size
    if name == IALLREDUCE:
        widened = 2 if element_bytes == 2 else 1
        halvings = (nodes - 1).bit_length()
        # Recursive halving and doubling; nodes beyond a power of two hand all to another first.
        rounds = [widened * size / (1 << k) for k in range(1, halvings + 1)] * 2
        crossing *= widened
        if nodes & (nodes - 1):
            rounds += 2 * [widened * size]
            crossing += 2 * widened * size
        messages = len(rounds)
    else:
        groups = nodes // group
        rounds = 2 * [size / group] + (2 * [size / nodes] if groups > 1 else [])
        messages = 2 * (group - 1) + 2 * (groups - 1)
    asking = sum(message > EAGER_BYTES for message in rounds)
    return len(rounds) + RENDEZVOUS * asking + MESSAGE * messages + crossing / BYTES_A_LATENCY

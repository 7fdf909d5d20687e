"""The table of ways: which collectives leave MPI's own calls, as measured.

`make bench-collectives` measures the ways beside each other and says where another one is better. A
way depends on nothing that differs over the ranks of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpiddp.collectives.operation import Group

__all__ = ["EXCHANGED_BY_MPI", "Row", "fits_lanes", "lanes_from", "rows", "trades_in_memory"]

_LANES_FROM_WITH_OPEN_MPI: dict[str, int | None] = {
    "all_reduce": 1 << 20,
    "reduce_scatter": 1 << 20,
    "all_gather": 1 << 20,
    "broadcast": 1 << 20,
}
# Measured with MPICH, which sums and broadcasts node by node itself.
_LANES_FROM_WITH_OTHERS: dict[str, int | None] = {
    "all_reduce": None,
    "reduce_scatter": 1 << 20,
    "all_gather": 4 << 20,
    "broadcast": 16 << 20,
}

# From how many bytes of a rank on an all_to_all_single of equal parts is MPI's: in memory each byte
# is copied twice, and MPI copies it once.
EXCHANGED_BY_MPI = 256 << 10

_TRADES = "gather, all_to_all, all_to_all_single with splits"
_MEMORY = "in memory that all ranks share"
_MESSAGES = "MPI's calls and messages"


@cache
def lanes_from() -> dict[str, int | None]:
    """Return from how many bytes of a rank's larger side on each collective goes in lanes.

    Not collective. None: it never does.
    """
    from mpi4py import MPI  # initialises MPI, which importing this file must not

    is_open_mpi = MPI.get_vendor()[0] == "Open MPI"
    return dict(_LANES_FROM_WITH_OPEN_MPI if is_open_mpi else _LANES_FROM_WITH_OTHERS)


def trades_in_memory(group: Group) -> bool:
    """Return whether ranks send each other parts of different sizes in memory. Not collective.

    There all ranks meet, also those that get nothing. Where ranks wait for cores, that takes longer
    than messages between those that have something to send.
    """
    return group.state.memory is not None and not group.crowded


def fits_lanes(group: Group, name: str, size: int) -> bool:
    """Return whether a collective goes in lanes, see Note [Lanes of a group]. Not collective.

    Args:
        group: the process group.
        name: a key of `lanes_from`.
        size: bytes of a rank's larger side.
    """
    least = lanes_from()[name]
    return least is not None and group.state.lanes is not None and size >= least


class Row(NamedTuple):
    """A line of the table, in words.

    Attributes:
        collectives: of which groups, or which of them.
        way: what they do.
    """

    collectives: str
    way: str


def rows(nodes: Sequence[int], crowded: bool) -> list[Row]:
    """Return the table in force for a group of all ranks, for people. Not collective.

    Args:
        nodes: how many ranks share memory, for each node; 1 on each where none do.
        crowded: whether they are more than the cores of their node.
    """
    if max(nodes) == 1:
        return [Row("all", _MESSAGES)]
    if len(nodes) == 1:
        exchanges = f"all_to_all_single from {EXCHANGED_BY_MPI >> 10} KiB on, scatter"
        table = [Row(exchanges, _MESSAGES)]
        if crowded:
            table.append(Row(_TRADES, "messages, since the ranks are more than the cores"))
        return [*table, Row("all others", _MEMORY)]
    table = [Row("of groups on one node", _MEMORY)]
    if len(set(nodes)) == 1:
        table += [
            Row(f"{name} from {size >> 20} MiB on", "in lanes between the nodes")
            for name, size in lanes_from().items()
            if size is not None
        ]
    return [*table, Row("all others", _MESSAGES)]

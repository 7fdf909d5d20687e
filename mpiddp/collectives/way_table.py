"""The table of ways: which collectives leave MPI's own calls, as measured.

`make bench-collectives` measures the ways beside each other and says where another one is better. A
way depends on nothing that differs over the ranks of a group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from mpiddp import settings

if TYPE_CHECKING:
    from mpiddp.collectives.operation import Group

__all__ = [
    "NEVER",
    "DirectFrom",
    "Row",
    "fits_lanes",
    "lanes_from",
    "rows",
    "tries_to_read",
]

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

# More than any tensor has.
NEVER = sys.maxsize

_MEMORY = "in memory that all ranks share"
_DIRECT = "out of each other's memory"
_DIRECT_TOO = f"{_MEMORY}, large ones {_DIRECT}"
_MESSAGES = "MPI's calls and messages"


@cache
def lanes_from() -> dict[str, int | None]:
    """Return from how many bytes of a rank's larger side on each collective goes in lanes.

    Not collective. None: it never does.
    """
    from mpi4py import MPI  # initialises MPI, which importing this file must not

    is_open_mpi = MPI.get_vendor()[0] == "Open MPI"
    return dict(_LANES_FROM_WITH_OPEN_MPI if is_open_mpi else _LANES_FROM_WITH_OTHERS)


def tries_to_read() -> bool:
    """Return whether this rank tries to read other ranks' memory. Not collective.

    Where there are GPUs it does not: collectives then also have tensors in pinned memory, of which
    it has not been tried whether Linux copies it so.
    """
    return settings.COLLECTIVES.read() == "memory" and torch.cuda.device_count() == 0


def fits_lanes(group: Group, name: str, size: int) -> bool:
    """Return whether a collective goes in lanes, see Note [Lanes of a group]. Not collective.

    Args:
        group: the process group.
        name: a key of `lanes_from`.
        size: bytes of a rank's larger side.
    """
    least = lanes_from()[name]
    return least is not None and group.state.lanes is not None and size >= least


class DirectFrom(NamedTuple):
    """From how many bytes of a rank's larger side on the ranks of a node read each other's memory.

    They measure it, see Note [Measured ways]. `NEVER`: what is longer does not either.

    Attributes:
        moves: of what is moved.
        sums: of what is reduced for one rank, or in parts.
        all_reduces: of what is reduced for all.
    """

    moves: int = NEVER
    sums: int = NEVER
    all_reduces: int = NEVER


class Row(NamedTuple):
    """A line of the table, in words.

    Attributes:
        collectives: of which groups, or which of them.
        way: what they do.
    """

    collectives: str
    way: str


def rows(nodes: Sequence[int], direct: DirectFrom | None) -> list[Row]:
    """Return the table in force for a group of all ranks, for people. Not collective.

    Args:
        nodes: how many ranks share memory, for each node; 1 on each where none do.
        direct: when those of a node read each other's memory; None: they may not.
    """
    if max(nodes) == 1:
        return [Row("all", _MESSAGES)]
    if len(nodes) == 1:
        return _rows_of_node(direct)
    table = [Row("of groups on one node", _DIRECT_TOO if _sizes(direct) else _MEMORY)]
    if len(set(nodes)) == 1:
        table += [
            Row(f"{name} from {size >> 20} MiB on", "in lanes between the nodes")
            for name, size in lanes_from().items()
            if size is not None
        ]
    return [*table, Row("all others", _MESSAGES)]


def _rows_of_node(direct: DirectFrom | None) -> list[Row]:
    if not _sizes(direct):
        return [Row("all", _MEMORY)]
    return [Row(", ".join(_sizes(direct)), _DIRECT), Row("all others", _MEMORY)]


def _sizes(direct: DirectFrom | None) -> list[str]:
    """Return in words what is read directly."""
    if direct is None:
        return []
    names = ("all that is moved", "sums", "all_reduce")
    return [
        f"{name} from {size >> 10} KiB on"
        for name, size in zip(names, direct, strict=True)
        if size != NEVER
    ]

"""Groups of this machine's ranks in the place of nodes."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from mpi4py import MPI
from replicas import RANK, SIZE

from mpiddp.mpi import nodes
from mpiddp.process_group import call_pages
from mpiddp.process_group.call_table import CallTable
from mpiddp.rendezvous import world

# Whether `group_in_lanes` says so if it made one without.
REQUIRES_LANES = True

# Of nodes of two ranks; kept, since it is mapped until the process ends.
_table: list[CallTable] = []

# The node of each rank, for as many ranks as there are.
NODES = {
    "one rank a node": [0, 1, 2, 3],
    "two and two": [0, 0, 1, 1],
    "in turn": [0, 1, 0, 1],
    "one and three": [0, 1, 1, 1],
    "three and one": [0, 0, 0, 1],
}


@contextmanager
def group_on(place: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """Make a group for whose modules the ranks are on these nodes. Collective."""
    own = place[:SIZE]
    monkeypatch.setattr(nodes, "ranks_of_node", lambda comm: comm.Split(own[RANK], RANK))
    made = dist.new_group()
    assert isinstance(made, dist.ProcessGroup)
    yield made
    dist.destroy_process_group(made)


@contextmanager
def group_in_lanes(
    monkeypatch: pytest.MonkeyPatch, timeout: timedelta | None = None
) -> Iterator[dist.ProcessGroup]:
    """Make a group of all ranks, two of which are on a node, with the next. Collective."""
    with monkeypatch.context() as patch:
        patch.setattr(nodes, "ranks_of_node", lambda comm: comm.Split(RANK // 2, RANK))
        if not _table:
            table = call_pages.make_call_table(MPI.COMM_WORLD, world._world.requests)
            assert table is not None
            _table.append(table)
        patch.setattr(world._world, "call_table", _table[0])
        made = dist.new_group(timeout=timeout)
        assert isinstance(made, dist.ProcessGroup)
        assert made.state.lanes is not None or not REQUIRES_LANES  # type: ignore[attr-defined]
        yield made
        dist.destroy_process_group(made)

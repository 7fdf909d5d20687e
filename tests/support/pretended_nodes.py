"""Groups of this machine's ranks in the place of nodes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from replicas import RANK, SIZE

from mpiddp.mpi import nodes

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

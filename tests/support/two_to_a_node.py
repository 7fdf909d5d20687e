"""A plugin of pytest: ranks 0 and 1 are on a node, 2 and 3 on the next one, and so on.

make test ARGS="-p two_to_a_node -n 4 tests/collectives"

Their collectives go in lanes, also small ones.
"""

import pytest
from mpi4py import MPI

from mpiddp.collectives import way_table
from mpiddp.mpi import nodes

# On one node alone sums are made in order of all ranks. A group that is destroyed on ranks that
# have not called what others wait for leaves messages behind; MPICH may hand them to a later group.
LEFT_OUT = ("test_much_is_added_in_order_of_ranks", "test_destroyed_where_some_have_not_called")


def _ranks_of_node(communicator: MPI.Intracomm) -> MPI.Intracomm:
    return communicator.Split(MPI.COMM_WORLD.Get_rank() // 2, communicator.Get_rank())


nodes.ranks_of_node = _ranks_of_node
for name in way_table.lanes_from():
    way_table.lanes_from()[name] = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not so between nodes."""
    left_out = [item for item in items if item.name.startswith(LEFT_OUT)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)

"""Which way a collective takes, and what the doctor says of it."""

import pytest
import torch

from mpiddp.collectives import way_table
from mpiddp.process_group.node_lanes import equal_nodes


def test_nodes_of_a_group() -> None:
    """Lanes need several nodes with as many ranks on each, at least two, that share memory."""
    here = [3, -1, 7, -1]
    assert equal_nodes([0, 0, 2, 2], here) == [[0, 1], [2, 3]]
    assert equal_nodes([0, 1, 0, 1], [3, 7, -1, -1]) == [[0, 2], [1, 3]]
    assert equal_nodes([0, 0, 0, 0], here) is None  # one node
    assert equal_nodes([0, 0, 0, 3], here) is None  # one rank has a node for itself
    assert equal_nodes([0, 0, 2, 2, 2], [*here, -1]) is None
    assert equal_nodes([0, 0, -1, -1], here) is None  # these share no memory
    assert equal_nodes([0, 0, 2, 2], [3, -1, -1, -1]) is None  # or have no place in it
    assert equal_nodes([0, 1], [3, 7]) is None


def test_rows() -> None:
    measured = way_table.DirectFrom(256 << 10, 1 << 20, 4 << 20)
    direct, memory = way_table.rows([2], measured)
    sizes = "all that is moved from 256 KiB on, sums from 1024 KiB on, all_reduce from 4096 KiB on"
    assert direct == (sizes, "out of each other's memory")
    assert memory == ("all others", "in memory that all ranks share")
    direct, _ = way_table.rows([4], way_table.DirectFrom(sums=1 << 20))
    assert direct.collectives == "sums from 1024 KiB on"
    every = [("all", memory.way)]
    assert way_table.rows([2], way_table.DirectFrom()) == every
    assert way_table.rows([2], None) == every  # they may not read each other's


def test_rows_of_several_nodes() -> None:
    alone, *lanes, others = way_table.rows([2, 2], None)
    assert alone == ("of groups on one node", "in memory that all ranks share")
    assert "large ones" in way_table.rows([2, 2], way_table.DirectFrom(moves=1 << 20))[0].way
    assert "large ones" not in way_table.rows([2, 2], way_table.DirectFrom())[0].way
    used = [size for size in way_table.lanes_from().values() if size is not None]
    assert len(lanes) == len(used) >= 3
    assert "reduce_scatter from 1 MiB on" in [row.collectives for row in lanes]
    assert others.way == "MPI's calls and messages"
    assert len(way_table.rows([3, 2], None)) == 2
    assert way_table.rows([1, 1], None) == [("all", "MPI's calls and messages")]


def test_where_torch_sees_a_gpu_nothing_is_read_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_COLLECTIVES", "memory")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert way_table.tries_to_read()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not way_table.tries_to_read()

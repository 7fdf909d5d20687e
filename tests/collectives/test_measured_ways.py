"""Which way long collectives take, as the ranks of a node measure it when they start."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_data import group, rank, size
from mpi4py import MPI

from mpiddp.collectives import measured_ways
from mpiddp.collectives.measured_ways import first_of
from mpiddp.collectives.node_memory import NodeMemory
from mpiddp.collectives.way_table import NEVER, DirectFrom
from mpiddp.mpi import nodes

ranks = pytest.mark.mpi(min_size=2)


@pytest.fixture
def memory() -> Iterator[Any]:
    of_world = group().state.memory
    if of_world is None or not of_world.reads_directly:
        pytest.skip("the ranks share no memory, or may not read each other's")
    before = of_world.direct_from
    yield of_world
    of_world.read_directly(*before)


@pytest.mark.parametrize(
    ("times", "first"),
    [
        ([(400, 2.0, 3.0), (100, 1.0, 1.5), (20, 0.5, 0.6)], 20),
        ([(400, 2.0, 3.0), (100, 1.0, 1.5), (20, 0.5, 0.4)], 100),
        ([(400, 2.0, 3.0), (100, 1.5, 1.0), (20, 0.5, 0.6)], 400),
        ([(400, 3.0, 2.0), (100, 1.0, 1.5), (20, 0.5, 0.6)], NEVER),
        ([(400, 2.0, 2.01)], NEVER),  # that is noise
    ],
)
def test_from_the_longest_on_which_reading_wins(
    times: list[tuple[int, float, float]], first: int
) -> None:
    asked = iter(times)
    assert first_of(asked) == first
    if first > 100:
        assert len(list(asked)) == len(times) - (2 if first == 400 else 1)


@ranks
def test_all_ranks_of_a_node_go_the_same_way(memory: Any) -> None:
    told: list[Any] = [None] * size()
    dist.all_gather_object(told, memory.direct_from)
    assert told == [told[0]] * size()
    assert set(told[0]) <= {256 << 10, 1 << 20, 4 << 20, NEVER}


@ranks
def test_new_groups_go_as_measured(memory: Any) -> None:
    made: Any = dist.new_group()
    assert made.state.memory.direct_from == memory.direct_from


@ranks
def test_a_rank_that_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start nobody watches for ranks that have died yet."""
    monkeypatch.setattr(measured_ways, "_PATIENCE", 0.3)
    node = nodes.ranks_of_node(MPI.COMM_WORLD)
    if node.Get_size() == 1:
        pytest.skip("a rank alone waits for nobody")
    memory = NodeMemory(node)
    if node.Get_rank() > 0:
        with pytest.raises(RuntimeError, match=r"rank [1-9] of .* has waited 0.3 s for the others"):
            measured_ways.measure(memory, node, group().requests)
    node.Barrier()
    node.Free()


@ranks
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["moves", "all_reduces"])
def test_the_measured_way_is_not_the_slow_one(name: str, memory: Any) -> None:
    measured = DirectFrom(*memory.direct_from)
    tensor, parts = torch.ones(1 << 20), torch.ones((1 << 20) // size() * size())

    def seconds(least: int) -> float:
        memory.read_directly(least, least, least)
        times = []
        for _ in range(20):
            dist.barrier()
            began = time.perf_counter()
            if name == "moves":
                dist.all_gather_single(parts, tensor[: parts.numel() // size()])
            else:
                dist.all_reduce(tensor, dist.ReduceOp.MAX)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    taken, other = (1, NEVER) if getattr(measured, name) <= 4 << 20 else (NEVER, 1)
    ratios = [seconds(taken) / seconds(other) for _ in range(5)]
    median = torch.tensor(statistics.median(ratios))
    dist.all_reduce(median)
    assert median.item() / size() < 1.5, f"rank {rank()}: {ratios}"

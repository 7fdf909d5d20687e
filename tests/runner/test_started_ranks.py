"""A function that a script wants started as its ranks: what each rank passes, meets and returns."""

import os
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from replicas import RANK, SIZE, gather, together
from torch import Tensor, multiprocessing

from mpiddp.mpi import nodes
from mpiddp.runner import spawn, started_ranks
from mpiddp.runner.started_ranks import Place, StartedRanks

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(60)]


@pytest.fixture
def ranks() -> Iterator[StartedRanks]:
    """All ranks, on one node."""
    from mpi4py import MPI

    own = MPI.COMM_WORLD.Dup()
    yield StartedRanks(own, nodes.find_topology(own), pytest.fail)
    own.Free()


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartedRanks]:
    """All ranks, the last one on a node of its own."""
    from mpi4py import MPI

    own = MPI.COMM_WORLD.Dup()
    second = RANK == SIZE - 1
    monkeypatch.setattr(nodes, "ranks_of_node", lambda comm: comm.Split(int(second), RANK))
    place = (0, 1, 1, 2) if second else (RANK, SIZE - 1, 0, 2)
    yield StartedRanks(own, nodes.Topology(RANK, SIZE, *place), pytest.fail)
    own.Free()


def start(ranks: StartedRanks, function: Any, *arguments: Any) -> started_ranks.Outcome:
    return ranks.run(function, Place(RANK, True), arguments)


@pytest.mark.smoke
def test_numbers_of_processes(ranks: StartedRanks) -> None:
    assert ranks.place_among(SIZE, "spawn") == Place(RANK, True)
    for count in (0, 1, SIZE + 1):
        said = f"rank {RANK}: spawn was asked for {count} process.*, but MPI started {SIZE}, "
        with pytest.raises(ValueError, match=said):
            ranks.place_among(count, "spawn")
    with pytest.raises(ValueError, match=r"\(it may have counted GPUs\)"):
        ranks.place_among(0, "spawn")


@pytest.mark.mpi(min_size=3)
def test_numbers_on_two_nodes(two_nodes: StartedRanks) -> None:
    """Either of all ranks, or of this node's, whose values come back then."""
    topology = two_nodes.topology
    assert two_nodes.place_among(SIZE, "spawn") == Place(RANK, True)
    place = two_nodes.place_among(topology.local_world_size, "spawn")
    assert place == Place(topology.local_rank, False)
    with pytest.raises(ValueError, match=f"MPI started {SIZE} on 2 nodes, "):
        two_nodes.place_among(SIZE + 1, "spawn")

    outcome = two_nodes.run(lambda where: (RANK, where), place, [topology.node_rank])
    own = (SIZE - 1,) if topology.node_rank else tuple(range(SIZE - 1))
    assert outcome.ranks == own
    assert outcome.values == tuple((rank, topology.node_rank) for rank in own)
    everyone = gather(os.getpid())
    assert outcome.process_ids == tuple(everyone[rank] for rank in own)


@pytest.mark.essential
def test_all_values_come_back(ranks: StartedRanks) -> None:
    outcome = start(ranks, lambda: RANK * 10)
    assert outcome.values == tuple(rank * 10 for rank in range(SIZE))
    assert outcome.ranks == tuple(range(SIZE))
    assert outcome.failure is None


def test_arguments_are_those_of_the_lowest_rank(ranks: StartedRanks) -> None:
    mine = {"port": 100 + RANK, "list": [RANK]}

    def function(options: dict[str, Any], text: str) -> tuple[dict[str, Any], str]:
        options["list"].append(7)
        return options, text

    outcome = start(ranks, function, mine, f"of {RANK}")
    assert outcome.values == (({"port": 100, "list": [0, 7]}, "of 0"),) * SIZE
    # Children of a process change copies.
    assert mine == {"port": 100 + RANK, "list": [RANK]}


def test_tensors_stay_the_parents(ranks: StartedRanks) -> None:
    """Their values are the lowest rank's; the function's writes are seen after it."""
    torch.manual_seed(RANK)
    model = torch.nn.Linear(3, 2)
    tied = [model.weight, model.weight]
    expected = gather(model.weight.tolist())[0]

    def function(module: torch.nn.Linear, same: list[Tensor]) -> tuple[Any, bool, bool]:
        weight = module.weight.tolist()
        with torch.no_grad():
            module.bias.fill_(RANK)
        return weight, same[0] is same[1] is module.weight, module is model

    outcome = start(ranks, function, model, tied)
    assert outcome.values == ((expected, True, False),) * SIZE
    assert model.bias.tolist() == [RANK, RANK]


def test_tensors_of_other_shapes(ranks: StartedRanks) -> None:
    outcome = start(ranks, lambda tensor: tensor.tolist(), torch.full((RANK + 1,), float(RANK)))
    assert outcome.values == ([0.0],) * SIZE


@pytest.mark.parametrize("kind", ["queue", "pipe", "shared"])
def test_what_ranks_cannot_share(
    ranks: StartedRanks, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    if kind == "queue":
        queue = get_context("spawn").SimpleQueue()
        outcome = start(ranks, lambda one: one.put(RANK), queue)
        assert queue.get() == RANK
        said = "SimpleQueue objects should only be shared between processes"
    elif kind == "pipe":
        ends = get_context("spawn").Pipe()
        outcome = start(ranks, lambda end: end.send(RANK), ends[0])
        assert ends[1].recv() == RANK
        for end in ends:
            end.close()
        said = "a pipe's end stays in its process"
    else:
        tensor = torch.zeros(2).share_memory_()
        outcome = start(ranks, lambda one: one.fill_(RANK).tolist(), tensor)
        assert tensor.tolist() == [RANK, RANK]
        said = "tensors in shared memory; each rank has its own"
    assert outcome.failure is None
    printed = capfd.readouterr().err
    with together():
        assert (said in printed) == (RANK == 0)


def test_all_learn_of_a_failure(ranks: StartedRanks) -> None:
    def function() -> None:
        if RANK == SIZE - 1:
            raise KeyError("broken on purpose")

    outcome = start(ranks, function)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.values) == (SIZE - 1, ())
    context = spawn._RankContext(outcome)
    codes = [process.exitcode for process in context.processes]
    assert codes == [0] * (SIZE - 1) + [1]
    assert context.pids() == gather(os.getpid())
    said = f"-- Process {SIZE - 1} terminated with the following error:\nTraceback (.|\n)*KeyError"
    with pytest.raises(multiprocessing.ProcessRaisedException, match=said) as raised:
        context.join()
    assert raised.value.error_index == SIZE - 1
    assert raised.value.error_pid == gather(os.getpid())[-1]
    # Only the function's own lines.
    assert "/started_ranks.py" not in str(raised.value)


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize(("code", "status"), [(0, 0), (None, 0), (3, 3), (-1, 255), ("why", 1)])
def test_exit_statuses(ranks: StartedRanks, code: Any, status: int) -> None:
    def function() -> None:
        raise SystemExit(code)

    outcome = start(ranks, function)
    if not status:
        assert outcome.values == (None,) * SIZE
        assert spawn._RankContext(outcome).join()
        return
    said = f"^process 0 terminated with exit code {status}$"
    with pytest.raises(multiprocessing.ProcessExitedException, match=said) as raised:
        spawn._RankContext(outcome).join()
    assert raised.value.exit_code == status


def test_value_that_cannot_be_sent(ranks: StartedRanks) -> None:
    failure = start(ranks, lambda: lambda: None).failure
    assert failure is not None
    assert "pickle" in failure.text


def test_launches_are_told_from_other_calls(ranks: StartedRanks) -> None:
    """With a process group, as here, or within the function, a call starts processes."""
    assert not ranks.may_launch()
    assert start(ranks, ranks.may_launch).values == (False,) * SIZE

"""The short way of synchronous collectives: the same for other ranks, and for who looks on."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_data import group, rank, size

from mpiddp.flight_recorder import ring

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def short_way() -> None:
    if "allreduce" not in group().__dict__:
        pytest.skip("the ranks share no memory")


def all_reduce(dtype: torch.dtype, op: Any) -> Callable[[], None]:
    def call() -> None:
        tensor = torch.full((6,), 2 + rank(), dtype=dtype)
        dist.all_reduce(tensor, op)
        total = sum(2 + of for of in range(size()))
        expected = total / size() if op == dist.ReduceOp.AVG else total
        assert torch.equal(tensor, torch.full((6,), expected, dtype=dtype))

    return call


def broadcast() -> None:
    tensor = torch.full((5,), rank())
    dist.broadcast(tensor, size() - 1)
    assert torch.equal(tensor, torch.full((5,), size() - 1))


def all_gather() -> None:
    outputs = [torch.empty(3) for _ in range(size())]
    dist.all_gather(outputs, torch.full((3,), float(rank())))
    assert torch.equal(torch.stack(outputs)[:, 0], torch.arange(size()).float())


def all_gather_single() -> None:
    output = torch.empty(size(), 3)
    group().all_gather_single(output, torch.full((3,), float(rank()))).wait()
    assert torch.equal(output[:, 0], torch.arange(size()).float())


def reduce_scatter_single() -> None:
    output = torch.empty(2)
    whole = torch.arange(2.0 * size())
    opts = dist.ReduceScatterOptions()
    opts.asyncOp = False
    group().reduce_scatter_single(output, whole, opts)
    assert torch.equal(output, whole[2 * rank() : 2 * rank() + 2] * size())


CALLS: dict[str, Callable[[], None]] = {
    "sum": all_reduce(torch.float32, dist.ReduceOp.SUM),
    "mean of halves": all_reduce(torch.bfloat16, dist.ReduceOp.AVG),
    "integers": all_reduce(torch.int64, dist.ReduceOp.SUM),
    "largest": lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX),
    "broadcast": broadcast,
    "all_gather": all_gather,
    "all_gather_single": all_gather_single,
    "reduce_scatter_single": reduce_scatter_single,
    "barrier": dist.barrier,
}


@pytest.mark.essential
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_some_ranks_go_the_long_way(call: Callable[[], None]) -> None:
    """Those that a profiler looks at; the others must neither wait nor find a difference."""
    for long_on in (0, 1):
        if rank() == long_on:
            with torch.profiler.profile():
                call()
        else:
            call()
        call()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_are_counted_and_recorded_alike(call: Callable[[], None]) -> None:
    part: Any = group()
    told = []
    for look in (False, True):
        before, compared = part.entered, part.state.compared
        if look:
            with torch.profiler.profile():
                call()
        else:
            call()
        last = ring.snapshot()[-1]
        assert last[8] > 0  # it has ended
        told.append((part.entered - before, part.state.compared - compared, last[3], part.last))
    assert told[0] == told[1]


def test_what_does_not_fit_is_told() -> None:
    part: Any = dist.new_group(timeout=timedelta(seconds=20))
    tensor = torch.ones(3)

    def other() -> None:
        dist.broadcast(tensor, 0, group=part)

    dist.barrier(part)
    call = (lambda: dist.all_reduce(tensor, group=part)) if rank() == 0 else other
    with pytest.raises(RuntimeError, match=r"does not fit|is broken"):
        call()
    dist.barrier()


def test_after_something_asynchronous_that_has_not_ended() -> None:
    first = torch.full((300_000,), 1.0)
    work = dist.all_reduce(first, async_op=True)
    second = torch.full((4,), 1.0)
    dist.all_reduce(second)
    assert work is not None
    work.wait()
    assert first[-1] == second[0] == size()


def test_other_tensors_go_the_long_way() -> None:
    for tensor in (
        torch.ones(2, 3).t(),
        torch.ones(0),
        torch.ones(2, dtype=torch.complex64),
        torch._neg_view(torch.full((2,), -1.0)),
    ):
        dist.all_reduce(tensor)
        assert bool((tensor == size()).all())

"""The short way of synchronous collectives: the same for other ranks, and for who looks on."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_data import group, rank, size
from torch._C._distributed_c10d import AllgatherOptions

from mpiddp.flight_recorder import ring
from mpiddp.process_group.direct_calls import DirectCalls

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
    opts = AllgatherOptions()
    opts.asyncOp = False
    group().all_gather_single(output, torch.full((3,), float(rank())), opts)
    assert torch.equal(output[:, 0], torch.arange(size()).float())


def reduce_scatter_single() -> None:
    output = torch.empty(2)
    whole = torch.arange(2.0 * size())
    opts = dist.ReduceScatterOptions()
    opts.asyncOp = False
    group().reduce_scatter_single(output, whole, opts)
    assert torch.equal(output, whole[2 * rank() : 2 * rank() + 2] * size())


def reduce_scatter() -> None:
    output = torch.empty(2)
    dist.reduce_scatter(output, [torch.full((2,), of + 0.5 * rank()) for of in range(size())])
    expected = size() * rank() + 0.5 * sum(range(size()))
    assert torch.equal(output, torch.full((2,), expected))


def reduce(op: Any) -> Callable[[], None]:
    def call() -> None:
        root = size() - 1
        tensor = torch.full((7,), 2.0 + rank())
        dist.reduce(tensor, root, op)
        total = sum(2.0 + of for of in range(size()))
        if rank() == root:
            expected = total / size() if op == dist.ReduceOp.AVG else total
            assert torch.equal(tensor, torch.full((7,), expected))

    return call


def of_rank(of: int) -> torch.Tensor:
    """Return what a rank gives: its number, more times the higher it is."""
    return torch.full((of + 1,), of)


def gather() -> None:
    root = size() - 1
    outputs = [torch.empty_like(of_rank(of)) for of in range(size())]
    dist.gather(of_rank(rank()), outputs if rank() == root else None, root)
    if rank() == root:
        assert all(torch.equal(output, of_rank(of)) for of, output in enumerate(outputs))


def scatter() -> None:
    root = size() - 1
    sent = [of_rank(of) for of in range(size())] if rank() == root else None
    output = torch.empty_like(of_rank(rank()))
    dist.scatter(output, sent, root)
    assert torch.equal(output, of_rank(rank()))


def part(source: int, target: int) -> torch.Tensor:
    """Return what one rank sends to another: other sizes both ways."""
    return torch.full((1 + source + 2 * target,), 10.0 * source + target)


def all_to_all() -> None:
    outputs = [torch.empty_like(part(of, rank())) for of in range(size())]
    dist.all_to_all(outputs, [part(rank(), of) for of in range(size())])
    assert all(torch.equal(output, part(of, rank())) for of, output in enumerate(outputs))


def all_to_all_single() -> None:
    output = torch.empty(size(), 3)
    dist.all_to_all_single(output, torch.arange(float(size())).repeat(3, 1).t().contiguous())
    assert torch.equal(output, torch.full((size(), 3), float(rank())))


def all_to_all_splits() -> None:
    """Of rows of two, also none for some rank."""
    splits = [(rank() + of) % size() for of in range(size())]
    output = torch.empty(sum(splits), 2)
    sent = [torch.full((rows, 2), 10.0 * rank() + of) for of, rows in enumerate(splits)]
    dist.all_to_all_single(output, torch.cat(sent), splits, splits)
    expected = [torch.full((rows, 2), 10.0 * of + rank()) for of, rows in enumerate(splits)]
    assert torch.equal(output, torch.cat(expected))


CALLS: dict[str, Callable[[], None]] = {
    "sum": all_reduce(torch.float32, dist.ReduceOp.SUM),
    "mean of halves": all_reduce(torch.bfloat16, dist.ReduceOp.AVG),
    "integers": all_reduce(torch.int64, dist.ReduceOp.SUM),
    "largest": lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX),
    "smallest halves": lambda: dist.all_reduce(torch.ones(3).half(), dist.ReduceOp.MIN),
    "mean of integers": lambda: dist.all_reduce(torch.full((2,), 6), dist.ReduceOp.AVG),
    "broadcast": broadcast,
    "all_gather": all_gather,
    "all_gather_single": all_gather_single,
    "reduce_scatter_single": reduce_scatter_single,
    "reduce_scatter": reduce_scatter,
    "sum for one": reduce(dist.ReduceOp.SUM),
    "mean for one": reduce(dist.ReduceOp.AVG),
    "largest for one": lambda: dist.reduce(torch.ones(3), 0, dist.ReduceOp.MAX),
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "all_to_all_single with splits": all_to_all_splits,
    "barrier": dist.barrier,
}
# What is not reduced as it lies.
LONG = {"mean of integers", "smallest halves"}


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


@pytest.mark.parametrize("name", CALLS)
def test_which_calls_take_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long = []
    for method in (each for each in group().__dict__ if hasattr(DirectCalls, each)):
        way = getattr(type(group()), method)

        def told(*arguments: Any, way: Any = way, **named: Any) -> Any:
            long.append(name)
            return way(*arguments, **named)

        monkeypatch.setattr(type(group()), method, told)
    CALLS[name]()
    assert bool(long) == (name in LONG)


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


def test_sizes_that_do_not_fit_are_told() -> None:
    """Of what may differ: both ends of a message must have the same."""
    calls: list[Callable[[Any], object]] = [
        lambda part: dist.gather(
            torch.ones(3 + rank()),
            [torch.ones(3) for _ in range(size())] if rank() == 0 else None,
            group=part,
        ),
        lambda part: dist.scatter(
            torch.ones(3 + rank()),
            [torch.ones(3) for _ in range(size())] if rank() == 0 else None,
            group=part,
        ),
        lambda part: dist.all_to_all(
            [torch.ones(3 if of == rank() else 4) for of in range(size())],
            [torch.ones(3) for _ in range(size())],
            group=part,
        ),
        lambda part: dist.all_to_all_single(
            torch.ones(2 * size()),
            torch.ones(2 * size() + (rank() == 0)),
            [2] * size(),
            [3 if rank() == 0 and of == 1 else 2 for of in range(size())],
            group=part,
        ),
    ]
    for call in calls:
        part: Any = dist.new_group(timeout=timedelta(seconds=20))
        dist.barrier(part)
        told = ""
        try:
            call(part)
        except RuntimeError as error:
            told = str(error)
        assert not told or "does not fit" in told or "is broken" in told
        assert some_rank(bool(told))
        dist.barrier()


def some_rank(raised: bool) -> bool:
    """Return whether some rank has raised."""
    everyone = torch.tensor([raised], dtype=torch.int32)
    dist.all_reduce(everyone)
    return bool(everyone)


@pytest.mark.parametrize("count", [4, 300_000])  # shown to the others, and read by them
def test_tensors_that_overlap(count: int) -> None:
    """As the long way, which copies first."""
    part = torch.arange(float(count))

    def expected() -> torch.Tensor:
        return torch.cat([part + count * rank() + 0.5 * of for of in range(size())])

    whole = torch.arange(float(count * size())) + 0.5 * rank()
    parts = list(whole.split(count))
    dist.all_to_all(parts, parts)
    assert torch.equal(whole, expected())
    whole = torch.arange(float(count * size())) + 0.5 * rank()
    dist.all_to_all_single(whole, whole)
    assert torch.equal(whole, expected())
    whole = torch.arange(float(count * size())) + 0.5 * rank()
    dist.all_to_all_single(whole, whole, [count] * size(), [count] * size())
    assert torch.equal(whole, expected())
    parts = list(torch.ones(size(), 5))
    dist.reduce_scatter(parts[0], parts)
    assert torch.equal(parts[0], torch.full((5,), float(size())))
    outputs = [torch.zeros(2) for _ in range(size())]
    outputs[rank()] += rank() + 1
    dist.gather(outputs[rank()], outputs if rank() == 0 else None)
    if rank() == 0:
        assert [int(output[1]) for output in outputs] == list(range(1, size() + 1))


def test_asynchronous_ones() -> None:
    output, parts = torch.empty(6), [torch.full((6,), 1.0 + rank()) for _ in range(size())]
    works = [
        dist.reduce_scatter(output, parts, async_op=True),
        dist.reduce(parts[0], 0, async_op=True),
        dist.all_to_all(
            received := [torch.empty(3) for _ in range(size())],
            [torch.full((3,), float(rank())) for _ in range(size())],
            async_op=True,
        ),
    ]
    for work in works:
        assert work is not None
        work.wait()
    total = sum(range(1, size() + 1))
    assert torch.equal(output, torch.full((6,), float(total)))
    assert rank() or torch.equal(parts[0], output)
    assert [int(each[0]) for each in received] == list(range(size()))


def test_other_tensors_go_the_long_way() -> None:
    for tensor in (
        torch.ones(2, 3).t(),
        torch.ones(0),
        torch.ones(2, dtype=torch.complex64),
        torch._neg_view(torch.full((2,), -1.0)),
    ):
        dist.all_reduce(tensor)
        assert bool((tensor == size()).all())

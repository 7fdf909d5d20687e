"""Operations that fail, or do not fit together: every rank raises, and nothing is mixed up."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_versions
from group_data import WHERE, new_group, rank, size

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(100)]

LONG = timedelta(seconds=30)
SHORT = timedelta(seconds=0.4)

NAMES = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
]

# Where the calls are compared, how many elements more one rank has, and whether it waits later.
SIZES_DIFFER = [
    *((where, scale, False) for where in WHERE for scale in (1, 50000)),
    *(("between nodes", scale, True) for scale in (1000, 50000)),
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpiddp.process_group import under_way
    from mpiddp.watch import roll_call

    monkeypatch.setattr(roll_call, "_PERIOD", 0.03)
    monkeypatch.setattr(under_way, "LAST", 0.1)


def sizes_that_differ(part: Any, more: int, later: bool = False) -> dict[str, Callable[[], Any]]:
    """Return each collective, with `more` elements in what one rank brings, asynchronous or not."""
    n, own = size(), 5 + more
    first = rank() == 0
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(own), group=part, async_op=later),
        "broadcast": lambda: dist.broadcast(torch.ones(own), 0, group=part, async_op=later),
        "reduce": lambda: dist.reduce(torch.ones(own), 0, group=part, async_op=later),
        "all_gather": lambda: dist.all_gather(
            [torch.empty(own) for _ in range(n)], torch.ones(own), group=part, async_op=later
        ),
        "all_gather_single": lambda: torch_versions.all_gather_single(
            torch.empty(own * n), torch.ones(own), group=part, async_op=later
        ),
        "gather": lambda: dist.gather(
            torch.ones(own),
            [torch.empty(5) for _ in range(n)] if first else None,
            group=part,
            async_op=later,
        ),
        "scatter": lambda: dist.scatter(
            torch.empty(own),
            [torch.ones(5) for _ in range(n)] if first else None,
            group=part,
            async_op=later,
        ),
        "reduce_scatter": lambda: dist.reduce_scatter(
            torch.empty(own), [torch.ones(own)] * n, group=part, async_op=later
        ),
        "reduce_scatter_single": lambda: torch_versions.reduce_scatter_single(
            torch.empty(own), torch.ones(own * n), group=part, async_op=later
        ),
        "all_to_all": lambda: dist.all_to_all(
            [torch.empty(own if other == rank() else 5) for other in range(n)],
            [torch.ones(own) for _ in range(n)],
            group=part,
            async_op=later,
        ),
        "all_to_all_single": lambda: dist.all_to_all_single(
            torch.empty(own * n), torch.ones(own * n), group=part, async_op=later
        ),
    }
    assert list(calls) == NAMES
    return calls


def meet_after(call: Callable[[], Any], part: Any) -> None:
    """Make a call that may end here although it does not fit, and one that then raises."""
    call()
    dist.barrier(group=part)


@pytest.mark.essential(keep=8)
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("where", "scale", "later"), SIZES_DIFFER)
@pytest.mark.parametrize("name", NAMES)
def test_sizes_that_differ(name: str, where: str, scale: int, later: bool) -> None:
    """As in the last batch of an uneven data set: an error on all ranks, at the next call at last.

    Small ones are sent at once; where larger ones did not fit, MPI has died of it.
    """
    part = new_group(where, LONG)
    more = scale if rank() == size() - 1 else 0
    call = sizes_that_differ(part, more, later)[name]
    with pytest.raises(RuntimeError, match=r"does not fit|where \d+ were expected|is broken"):
        meet_after(lambda: call().wait() if later else call(), part)
    with pytest.raises(RuntimeError, match="group is broken"):
        dist.barrier(group=part)
    dist.barrier()
    again = dist.new_group(timeout=LONG)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=again)
    assert tensor.tolist() == [size()] * 2
    dist.destroy_process_group(again)
    dist.destroy_process_group(part)


@pytest.mark.essential
@pytest.mark.parametrize("count", [3, 5000])
@pytest.mark.parametrize("later", [False, True])
def test_all_ranks_are_told_between_nodes(count: int, later: bool) -> None:
    """Each by its own call, whether it waits at once or later."""
    part = new_group("between nodes", LONG)
    last = rank() == size() - 1
    tensors = [torch.zeros(count + last) for _ in range(size())]

    def call() -> None:
        work = dist.all_gather(tensors, torch.ones(count + last), part, async_op=later)
        if work is not None:
            work.wait()

    with pytest.raises(RuntimeError, match=r"does not fit") as caught:
        call()
    for told in (count, count + 1):
        assert f" called all_gather of float32 ({told},)" in str(caught.value)
    dist.barrier()
    dist.destroy_process_group(part)


@pytest.mark.essential
@pytest.mark.parametrize("where", WHERE)
def test_what_one_rank_is_refused_the_others_are_told(where: str) -> None:
    part = new_group(where, LONG)
    last = rank() == size() - 1
    tensors = [torch.zeros(3) for _ in range(size() - last)]
    with pytest.raises((RuntimeError, ValueError), match=r"needs \d output|does not fit|is broken"):
        meet_after(lambda: dist.all_gather(tensors, torch.ones(3), part), part)
    dist.barrier()
    dist.destroy_process_group(part)


@pytest.mark.parametrize("where", WHERE)
def test_what_all_ranks_are_refused_breaks_nothing(where: str) -> None:
    part = new_group(where, LONG)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"needs \d output"):
            dist.all_gather([torch.zeros(3)], torch.ones(3), part)
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=part)
        assert tensor.tolist() == [size()] * 2
    dist.destroy_process_group(part)


@pytest.mark.essential
@pytest.mark.parametrize("where", WHERE)
def test_another_collective_of_the_same_size(where: str) -> None:
    part = new_group(where, LONG)
    tensor = torch.ones(3)
    calls = {
        True: lambda: dist.broadcast(tensor, 0, group=part),
        False: lambda: dist.all_reduce(tensor, group=part),
    }
    with pytest.raises(RuntimeError, match=r"does not fit what other ranks|group is broken"):
        meet_after(calls[rank() == 0], part)
    dist.barrier()
    dist.destroy_process_group(part)


@pytest.mark.smoke
def test_a_retry_does_not_meet_the_next_operation() -> None:
    part: Any = dist.new_group(timeout=SHORT)
    last = rank() == size() - 1
    dist.barrier()
    if last:
        dist.barrier()  # slower than the time limit, once
    else:
        with pytest.raises(RuntimeError, match=r"has waited 0\.4 s"):
            dist.all_reduce(torch.full((2,), 1.0), group=part)
    for number in (1.0, 100.0):
        with pytest.raises(RuntimeError, match="group is broken: all_reduce on rank"):
            dist.all_reduce(torch.full((2,), number), group=part)
    if not last:
        dist.barrier()
    dist.destroy_process_group(part)


@pytest.mark.essential
@pytest.mark.parametrize("later", [False, True])
def test_a_late_message_is_not_written(later: bool) -> None:
    """Nor one whose sender has not heard that nobody waits."""
    part: Any = dist.new_group([0, 1], timeout=SHORT)
    tensor = torch.zeros(3)
    if rank() == 1:
        work = dist.irecv(tensor, 0, part)
        assert work is not None
        while later and not work.is_completed():
            time.sleep(0.01)
            part.under_way.sweep()  # as the next operation does
        with pytest.raises(RuntimeError, match=r"has waited 0\.4 s"):
            work.wait()
        tensor.fill_(-1)
    elif rank() == 0:
        part.state.page = part.state.blocks = part.state.memory = part.state.lanes = None
        part.hear = lambda reason: None
    dist.barrier()
    if rank() == 0:
        dist.isend(torch.ones(3), 1, part)
    dist.barrier()
    if rank() == 1:
        for _ in range(20):
            part._communicator.Iprobe()  # makes progress
            time.sleep(0.01)
        assert tensor.tolist() == [-1.0] * 3
        request = part._communicator.Irecv(tensor.numpy(), 0, 0)
        request.Wait()  # it had not been taken
    dist.barrier()


@pytest.mark.essential
def test_who_waits_is_told() -> None:
    """Long before its own time limit."""
    part: Any = dist.new_group(timeout=LONG)
    began = time.monotonic()
    if rank() == 0:
        work = dist.all_reduce(torch.ones(3), group=part, async_op=True)
        assert work is not None
        dist.barrier()
        with pytest.raises(RuntimeError, match=r"collective 1\b.* does not fit"):
            work.wait()
        assert time.monotonic() - began < LONG.total_seconds() / 2
    else:
        dist.barrier()
        with pytest.raises(RuntimeError, match=r"does not fit|is broken"):
            dist.all_reduce(torch.ones(4), group=part)
    dist.barrier()


def test_pages_are_given_back() -> None:
    """More groups than there are pages, one after the other."""
    from mpiddp.process_group.call_table import CallTable

    taken = set()
    for _ in range(3):
        part: Any = dist.new_group()
        page = part.state.page
        assert page is not None
        assert page.broken == 0
        dist.all_reduce(torch.ones(1), group=part)
        taken.add(id(page))
        dist.barrier()
        dist.destroy_process_group(part)
        dist.barrier()
        assert part.state.page is None
    assert CallTable is not None

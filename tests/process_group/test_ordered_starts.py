"""Between nodes the data of asynchronous collectives follows blocks, in the order of calls."""

import contextlib
import random
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_data import new_group, rank, size

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(100)]

# More than a block has room for.
COUNT = 5000
LONG = timedelta(seconds=60)


@pytest.fixture
def part() -> Any:
    made = new_group("between nodes", LONG)
    yield made
    dist.barrier()
    dist.destroy_process_group(made)


def summed(value: float, part: Any, count: int = COUNT) -> tuple[torch.Tensor, Any]:
    tensor = torch.full((count,), value)
    return tensor, dist.all_reduce(tensor, group=part, async_op=True)


@pytest.mark.essential
def test_data_waits_for_what_all_ranks_call(part: Any) -> None:
    """A rank that is alone has sent nothing but its block."""
    if rank() == 0:
        tensor, work = summed(1.0, part)
        time.sleep(0.05)
        assert [each.begun for each in work.pending] == [True, False]
        dist.barrier()
    else:
        dist.barrier()
        tensor, work = summed(1.0, part)
    work.wait()
    assert tensor.eq(size()).all()


@pytest.mark.essential
def test_nobody_waits(part: Any) -> None:
    """Data begins, and ends, while this rank calls nothing."""
    works = [summed(float(number), part) for number in range(20)]
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if all(each.done for _, work in works for each in work.pending):
            break
        time.sleep(0.001)
    assert all(each.done for _, work in works for each in work.pending)
    for number, (tensor, work) in enumerate(works):
        work.wait()
        assert tensor.eq(number * size()).all()


@pytest.mark.essential
def test_waited_for_in_any_order(part: Any) -> None:
    """Other orders on each rank, among collectives that wait at once, and some in a block."""
    works = []
    for number in range(60):
        works.append((number, *summed(float(number), part, COUNT if number % 3 else 4)))
        if number % 10 == 7:
            tensor = torch.full((COUNT,), 0.5)
            dist.all_reduce(tensor, group=part)
            assert tensor.eq(0.5 * size()).all()
        if number % 10 == 9:
            tensors = [torch.zeros(COUNT) for _ in range(size())]
            dist.all_gather(tensors, torch.full((COUNT,), float(rank())), group=part)
            assert [tensor[0].item() for tensor in tensors] == list(range(size()))
    random.Random(rank()).shuffle(works)
    for number, tensor, work in works:
        if number % 2:
            while not work.is_completed():
                time.sleep(0)
        work.wait()
        assert tensor.eq(number * size()).all()


def test_waiters_in_several_threads(part: Any) -> None:
    works = [summed(float(number), part) for number in range(40)]
    threads = [threading.Thread(target=work.wait) for _, work in reversed(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (tensor, _) in enumerate(works):
        assert tensor.eq(number * size()).all()


@pytest.mark.essential
def test_futures_and_coalesced(part: Any) -> None:
    futures = [summed(float(number), part)[1].get_future() for number in range(10)]
    torch._C._collect_all(futures).wait()
    for number, future in enumerate(futures):
        assert future.value()[0].eq(number * size()).all()
    tensors = [torch.full((COUNT,), float(number)) for number in range(3)]
    with dist._coalescing_manager(group=part, async_ops=True) as together:
        for tensor in tensors:
            dist.all_reduce(tensor, group=part)
    together.wait()
    for number, tensor in enumerate(tensors):
        assert tensor.eq(number * size()).all()


@pytest.mark.parametrize("completed", [False, True], ids=["waited for", "polled"])
def test_without_a_thread(part: Any, monkeypatch: pytest.MonkeyPatch, completed: bool) -> None:
    """Whoever waits, or asks, begins what was called before."""
    monkeypatch.setattr(part.completion.starter, "add", lambda starts: None)
    works = [summed(float(number), part) for number in range(5)]
    tensor, work = works[-1]
    while completed and not work.is_completed():
        time.sleep(0)
    work.wait()
    assert tensor.eq(4 * size()).all()
    for _, other in works:
        other.wait()


@pytest.mark.essential
def test_nothing_follows_what_does_not_fit(part: Any) -> None:
    """Those that were called later raise too, whoever is asked first."""
    fits = summed(1.0, part)[1]
    works = [summed(1.0, part, COUNT + (rank() == 0))[1]]
    with contextlib.suppress(RuntimeError):  # another rank may have found it already
        works.append(summed(1.0, part)[1])
    fits.wait()
    for work in reversed(works):
        with pytest.raises(RuntimeError, match=r"collective 2 .*does not fit|is broken"):
            work.wait()
    with pytest.raises(RuntimeError, match="is broken"):
        dist.barrier(group=part)


def test_time_limit_of_data_that_never_begins() -> None:
    made = new_group("between nodes", timedelta(seconds=0.4))
    if rank() == 0:
        tensor, work = summed(1.0, made)
        with pytest.raises(RuntimeError, match=r"has waited 0\.4 s"):
            work.wait()
        tensor.fill_(-1)
    dist.barrier()
    if rank():
        with pytest.raises(RuntimeError, match="is broken"):
            summed(1.0, made)[1].wait()
    dist.barrier()
    if rank() == 0:
        time.sleep(0.1)
        assert tensor.eq(-1).all()
    dist.destroy_process_group(made)

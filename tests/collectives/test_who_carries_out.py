"""How long a rank goes on with an asynchronous collective before its call returns."""

import time

import pytest
import torch
import torch.distributed as dist
from group_data import group, rank, size

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]

SHORT, LONG = 512, 1 << 20  # elements: one meeting, and several steps of all ranks
TRIALS = 30


@pytest.fixture
def own_cores() -> None:
    if group().state.memory is None or group().requests.crowded:
        pytest.skip("the ranks share no memory, or wait for each other's cores")


def begun(count: int, late: float) -> tuple[dist.Work, torch.Tensor, float, bool]:
    """Begin an all-reduce to which rank 1 comes some seconds late.

    Returns:
        Its Work, its tensor, the seconds that the call took, and whether it had ended then.
    """
    tensor = torch.full((count,), float(rank() + 1))
    dist.barrier()
    if rank() == 1:
        until = time.perf_counter() + late
        while time.perf_counter() < until:
            pass
    began = time.perf_counter()
    work = dist.all_reduce(tensor, async_op=True)
    took = time.perf_counter() - began
    return work, tensor, took, type(work).__name__ == "EndedWork"


def ended(count: int, late: float, leave: bool) -> list[bool]:
    """Return of each trial whether the call of rank 0 went on until the end."""
    result = []
    for _ in range(TRIALS):
        work, tensor, _, had_ended = begun(count, late)
        if leave:  # for longer than anybody who waits at once
            time.sleep(5e-3)
        work.wait()
        assert torch.equal(tensor, torch.full((count,), size() * (size() + 1) / 2))
        result.append(had_ended)
    return result


@pytest.mark.usefixtures("own_cores")
class TestHabit:
    def test_who_has_waited_at_once_is_expected_to(self) -> None:
        seen = ended(SHORT, 0.5e-3, leave=False)
        if rank() == 0:
            assert not seen[0]
            assert sum(seen[5:]) > (TRIALS - 5) / 2

    def test_who_has_not_waited_at_once_is_not(self) -> None:
        ended(SHORT, 0.0, leave=False)
        seen = ended(SHORT, 0.5e-3, leave=True)
        if rank() == 0:
            assert sum(seen[5:]) < (TRIALS - 5) / 2

    def test_what_nobody_has_waited_for_ends_the_habit(self) -> None:
        ended(SHORT, 0.0, leave=False)
        works = [begun(SHORT, 0.0)[0] for _ in range(2)]
        work, tensor, _, had_ended = begun(SHORT, 0.5e-3)
        for each in (*works, work):
            each.wait()
        assert rank() != 0 or not had_ended
        assert tensor[0] == size() * (size() + 1) / 2


@pytest.mark.usefixtures("own_cores")
class TestCores:
    def test_long_ones_go_on_where_no_core_is_left_over(self) -> None:
        seen = ended(LONG, 0.2e-3, leave=True)
        if rank() == 0:
            if group().requests.thread_has_core:
                assert sum(seen) < TRIALS / 2
            else:
                assert sum(seen) > TRIALS / 2

    def test_nobody_is_waited_for_long(self) -> None:
        calls = []
        for _ in range(5):
            work, tensor, took, _ = begun(LONG, 60e-3)
            work.wait()
            assert torch.equal(tensor, torch.full((LONG,), size() * (size() + 1) / 2))
            calls.append(took)
        assert rank() != 0 or min(calls) < 30e-3


def test_the_thread_yields_where_ranks_take_turns() -> None:
    """With more ranks than cores; else it naps."""
    part = group()
    if part.state.memory is None:
        pytest.skip("the ranks share no memory")
    values = torch.rand(200, 200)
    yields = []
    for late in (0.0, 0.1):
        tensor = torch.full((4 << 20,), float(rank() + 1))
        dist.barrier()
        before = part.engine.counters
        if rank() == 0:
            time.sleep(late)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        while part.engine.has_thread and not future.done():  # nobody else moves it
            values = values @ values
        future.wait()
        yields.append(part.engine.counters["yields"] - before["yields"])
        assert torch.equal(tensor, torch.full_like(tensor, size() * (size() + 1) / 2))
    some = torch.tensor(yields, dtype=torch.float64)
    dist.all_reduce(some)
    assert bool((some > 0).all()) == (part.requests.crowded and part.engine.has_thread)

"""torch.distributed.monitored_barrier on groups of mpiddp: it names who is missing."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_data import rank, size

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(60)]

SHORT = timedelta(seconds=0.3)
LONG = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def _quick_answers(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpiddp.watch import roll_call

    monkeypatch.setattr(roll_call, "_PERIOD", 0.03)
    # A busy machine must not look like a rank that is silent.
    monkeypatch.setattr(roll_call, "_PATIENCE", 30.0)


@pytest.fixture
def part() -> Any:
    group = dist.new_group(timeout=SHORT)
    dist.barrier()  # all know it, however busy this machine is
    return group


def error(group: Any, **options: Any) -> str:
    from mpiddp.flight_recorder import ring

    with pytest.raises(RuntimeError) as caught:
        dist.monitored_barrier(group, **options)
    # Else the watchdog would speak of it for ever.
    assert all(each[8] for each in ring.snapshot() if each[1] == group.source.number)
    return str(caught.value)


def passed_together(group: Any, **options: Any) -> bool:
    """Pass a barrier; return whether all have left it after the last one came."""
    came = time.monotonic()  # the same clock for all processes of a machine
    assert dist.monitored_barrier(group, **options) is None
    moments = torch.tensor([-came, time.monotonic()], dtype=torch.float64)
    dist.all_reduce(moments, dist.ReduceOp.MIN)
    return bool(moments[1] >= -moments[0])


def test_nobody_leaves_before_the_last_has_come() -> None:
    for late in range(size()):
        dist.barrier()
        if rank() == late:
            time.sleep(0.1)
        assert passed_together(None)


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("all_ranks", [False, True])
def test_missing_ranks_are_named_on_all(part: Any, all_ranks: bool) -> None:
    """And nobody has to wait for its own time limit once rank 0 has given up."""
    missing = list(range(1, size()))[-2:]
    named = f"Rank {missing[0]}"
    if all_ranks:
        named = f"Ranks {', '.join(map(str, missing))}"
    failed = f"[Rank 0]: {named} failed to pass monitoredBarrier in 300 ms"
    timeout = SHORT if rank() == 0 else LONG
    if rank() == 0:
        for here in range(1, missing[0]):  # they are not late, however busy this machine is
            part.communicator.Probe(source=here)
    if rank() not in missing:
        text = error(part, timeout=timeout, wait_all_ranks=all_ranks)
        assert failed in text
        if rank() == 0:
            assert "not called it (no collective of this group so far)" in text
        else:
            assert text.startswith(f"Rank {rank()} successfully reached monitoredBarrier, but")
    dist.barrier()
    if rank() in missing:
        assert failed in error(part, timeout=LONG, wait_all_ranks=all_ranks)
    dist.barrier()
    # What came late is not taken for the next one.
    if rank() == 1:
        time.sleep(0.1)
    assert passed_together(part, timeout=LONG)


def test_rank_0_is_missing(part: Any) -> None:
    """The time limit is the group's."""
    if rank() > 0:
        text = error(part)
        assert (
            f"Rank {rank()} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank 0: no answer in 300 ms" in text
        )
        assert "Rank 0 has not called it" in text
    dist.barrier()
    if rank() == 0:
        # It finds those messages, which it cannot tell from punctual ones.
        dist.monitored_barrier(part, timeout=LONG)
    dist.barrier()
    dist.monitored_barrier(part, timeout=LONG)


def test_no_time_at_all(part: Any) -> None:
    """As torch says it, on rank 0; the others are not here yet."""
    if rank() == 0:
        assert "Rank 0 timed out in monitoredBarrier" in error(part, timeout=timedelta(0))


def test_messages_of_a_failed_barrier_reach_no_other_operation() -> None:
    part: Any = dist.new_group(timeout=LONG)
    if rank() == 1:
        error(part, timeout=SHORT)
    dist.barrier()
    received = [torch.zeros(1, dtype=torch.int64) for _ in range(size())]
    dist.all_to_all(received, [torch.tensor([10 * rank()])] * size(), group=part)
    assert torch.cat(received).tolist() == [10 * each for each in range(size())]


@pytest.mark.mpi(min_size=3)
def test_group_of_some_ranks() -> None:
    part: Any = dist.new_group([0, size() - 1], timeout=LONG)
    if rank() in (0, size() - 1):
        dist.monitored_barrier(part)
        if rank() == 0:
            text = error(part, timeout=SHORT)
            assert "Rank 1 failed to pass" in text
            assert (
                f"World rank {size() - 1} has not called it (last called: monitored_barrier" in text
            )
    dist.barrier()


@pytest.mark.essential
def test_arguments(part: Any) -> None:
    with pytest.raises(TypeError, match=r"of type datetime\.timedelta, got 5"):
        dist.monitored_barrier(part, timeout=5)
    with pytest.warns(UserWarning, match="taken for seconds"):
        dist.monitored_barrier(part, timeout=20.0)


def test_gloo_s_is_torch_s(gloo: Any) -> None:
    with pytest.raises(TypeError, match="timedelta"):
        dist.monitored_barrier(gloo, timeout=5)
    dist.monitored_barrier(gloo, timeout=LONG)

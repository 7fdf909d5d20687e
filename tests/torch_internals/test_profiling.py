"""What torch's profiler sees of gradients and operations: the events that Gloo's have."""

import pytest
import torch
import torch.distributed as dist
from models import loss_of, mlp
from replicas import RANK, SIZE, together

from mpiddp import DistributedDataParallel as DDP

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.smoke,
    # torch 2.11 says so at any profile.
    pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle"),
]

STEPS = 3


def profile() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def named(
    profiler: torch.profiler.profile, name: str
) -> list[torch.autograd.profiler_util.FunctionEvent]:
    return [event for event in profiler.events() if event.name.endswith(name)]


def test_reductions_of_buckets():
    """Each is an asynchronous all-reduce; the order of buckets is broadcast once."""
    wrapped = DDP(mlp(3, 2))
    with profile() as profiler:
        for _ in range(STEPS):
            loss_of(wrapped, torch.ones(2, 3, dtype=torch.float64)).backward()
    events = named(profiler, "mpiddp:all_reduce")
    with together():
        assert len(events) == STEPS * len(wrapped.reducer.buckets)
        assert all(event.is_async for event in events)
        assert named(profiler, "mpiddp:broadcast")
        assert not named(profiler, "search_unused_parameters")


def test_search_for_unused_parameters():
    wrapped = DDP(mlp(3, 2), find_unused_parameters=True)
    x = torch.ones(2, 3, dtype=torch.float64)
    loss_of(wrapped, x).backward()
    with profile() as profiler:
        loss_of(wrapped, x).backward()
    loss_of(wrapped, x).backward()
    with together():
        assert len(named(profiler, "mpiddp:all_reduce")) == len(wrapped.reducer.buckets)
        assert len(named(profiler, "search_unused_parameters")) == 1


@pytest.mark.parametrize("in_background", [False, True])
def test_operations(in_background):
    """They are asynchronous to the profiler."""
    with profile() as profiler:
        work = dist.all_reduce(torch.ones(3, 4), async_op=in_background)
        if in_background:
            work.wait()
    (event,) = named(profiler, "mpiddp:all_reduce")
    with together():
        assert event.is_async


def test_messages_from_any_rank():
    with profile() as profiler:
        if RANK == 0:
            for _ in range(SIZE - 1):
                dist.recv(torch.empty(2))
        else:
            dist.send(torch.ones(2), 0)
    with together():
        if RANK == 0:
            assert len(named(profiler, "mpiddp:recvAnySource")) == SIZE - 1
        else:
            assert len(named(profiler, "mpiddp:send")) == 1

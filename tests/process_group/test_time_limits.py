"""Time limits are each operation's own: what goes on beside it does not extend them."""

import threading
import time
from datetime import timedelta
from typing import Any

import patience
import pytest
import torch
import torch.distributed as dist
from group_data import rank
from torch._C._distributed_c10d import AllreduceOptions

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]

# Seconds that a stuck operation is waited for, and in which it must have been given up.
LIMIT = 0.7
SOON = 5.0
PAUSE = 0.01


class Traffic(threading.Thread):
    """Operations that end in short intervals, through the engine, until rank 0 has enough."""

    def __init__(self) -> None:
        super().__init__()
        self.group = dist.new_group()
        self.rounds = 0
        self.enough = threading.Event()

    def run(self) -> None:
        enough = torch.zeros(1)
        while not enough.item():
            if rank():
                time.sleep(PAUSE)
            enough.fill_(self.enough.is_set())
            work = dist.all_reduce(enough, group=self.group, async_op=True)
            assert work is not None
            work.wait()
            self.rounds += 1


def seconds_until_given_up(work: dist.Work, limit: float) -> float:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="has waited"):
        work.wait(timedelta(seconds=limit))
    return time.monotonic() - began


def test_others_progress_does_not_count() -> None:
    """A receive whose message does not come ends, whatever else arrives."""
    traffic = Traffic()
    traffic.start()
    tensor = torch.zeros(1)
    waited, before = 0.0, traffic.rounds
    if rank() == 0:
        work = dist.irecv(tensor, 1)
        assert work is not None
        waited = seconds_until_given_up(work, LIMIT)
        went_on = traffic.rounds - before
        traffic.enough.set()
    traffic.join()
    if rank() == 1:
        dist.send(torch.ones(1), 0)
    if rank() == 0:
        # Only the wait was over, not the receive.
        work.wait()
        assert tensor.item() == 1
        assert LIMIT <= waited < patience.enough(SOON)
        assert went_on > 2


def test_two_threads_wait_for_one_operation() -> None:
    """The one that waits for less time does not wait as long as the other."""
    tensor = torch.zeros(1)
    if rank() == 0:
        work = dist.irecv(tensor, 1)
        assert work is not None
        patient = threading.Thread(target=work.wait)
        patient.start()
        time.sleep(0.2)
        # With a future to complete, too.
        waited = seconds_until_given_up(work, LIMIT)
        dist.send(torch.zeros(1), 1)
        patient.join()
        assert tensor.item() == 1
        assert waited < patience.enough(SOON)
    if rank() == 1:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.ones(1), 0)


def test_several_steps_share_one_limit() -> None:
    """An operation of several MPI calls has one time limit, not one for each of them."""
    part: Any = dist.new_group(timeout=timedelta(seconds=LIMIT))
    # The others make the steps one by one, and do not hear that the first has given up.
    part.state.page = part.state.blocks = part.state.memory = part.state.lanes = None
    part.hear = lambda reason: None
    works: list[dist.Work] = []
    waited = 0.0
    if rank() == 0:
        at_once = AllreduceOptions()
        at_once.asyncOp = False
        began = time.monotonic()
        # Each ends within the limit, all of them do not.
        with pytest.raises(RuntimeError, match=f"has waited {LIMIT} s"):
            part.allreduce([torch.ones(1) for _ in range(8)], at_once)
        waited = time.monotonic() - began
    else:
        for _ in range(8):
            time.sleep(LIMIT / 2)
            works.append(part.allreduce([torch.ones(1)]))
    dist.barrier()
    for work in works:
        work.wait(timedelta(seconds=20))
    dist.barrier()
    if rank() == 0:
        assert waited >= LIMIT
    dist.destroy_process_group(part)

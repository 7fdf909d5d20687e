"""A bucket of gradients that some ranks never fill: the error names them and what they do."""

import contextlib
import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import mpirun
import pytest
import torch
import torch.distributed as dist
from models import loss_of, mlp
from replicas import RANK, SIZE, together

from mpiddp import DistributedDataParallel as DDP
from mpiddp.flight_recorder import page, ring
from mpiddp.watch import node_states

marked = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(100)]

LAST = SIZE - 1


@pytest.fixture(autouse=True)
def _quick_answers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("mpi") is not None:
        from mpiddp.watch import roll_call

        monkeypatch.setattr(roll_call, "_PERIOD", 0.03)
        monkeypatch.setattr(roll_call, "_PATIENCE", 30.0)  # this machine is busy


def wrap(*widths: int, **options: Any) -> DDP:
    """Return a wrapped module whose ranks do not wait long."""
    part: Any = dist.new_group()
    wrapped = DDP(mlp(*widths), process_group=part, bucket_cap_mb=1e-6, **options)
    until_all_are_here()
    part.set_timeout(timedelta(seconds=2))
    return wrapped


def draw() -> torch.Tensor:
    return torch.ones(2, 3, dtype=torch.float64)


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError, match="has waited 2 s") as caught:
        call()
    return str(caught.value)


def own_page() -> bytes:
    """Return what the other ranks of the node see of this one."""
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(each).startswith("/memfd:mpiddp-last-done"):
                return each.read_bytes()
    raise AssertionError


def until_all_are_here() -> None:
    """Wait on another group, as a program that goes on elsewhere would."""
    dist.barrier()


class TestMissingRanks:
    pytestmark = marked

    @pytest.mark.essential(keep=1)
    @pytest.mark.thorough(keep=1)
    @pytest.mark.parametrize("transport", ["auto", "mpi"])
    def test_that_are_elsewhere(self, views, transport):
        wrapped = wrap(3, 4, 2, gradient_as_bucket_view=views, transport=transport)
        loss_of(wrapped, draw()).backward()
        loss = loss_of(wrapped, draw())
        dist.all_reduce(torch.ones(3), group=wrapped.process_group)
        with together():
            if RANK != LAST:
                text = message_of(loss.backward)
                assert f"rank {RANK}: the all-reduce of gradient bucket 0 (parameter '" in text
                assert "of wrapped module 1 (Sequential) has waited" in text
                assert (
                    f"Rank {LAST} has not filled it (1 of its backward passes are reduced, "
                    f"2 forward passes begun; last collective called: "
                    f"all_reduce(SUM) of float32 (3,), #" in text
                )
                assert "not answer" not in text
                # Nobody waits for these buckets any more.
                source = wrapped.reducer.record_source
                records = [each for each in ring.snapshot() if each[1] == source]
                assert records
                assert all(each[8] for each in records)
                bucket = page.read(own_page())[1]
                assert bucket is not None
                assert bucket.ended == -1
                page.name(source + 48, "another module, at the place of this one")
                assert "2 of a module (given up, begun " in node_states._last(own_page())
        # What the others have launched ends well when it comes.
        if RANK == LAST:
            loss.backward()
        until_all_are_here()

    @pytest.mark.thorough
    def test_in_the_middle_of_backward(self, views):
        wrapped = wrap(3, 4, 2, gradient_as_bucket_view=views)
        if RANK == LAST:
            wrapped.module[0].weight.register_hook(lambda gradient: until_all_are_here())
        loss = loss_of(wrapped, draw())
        if RANK == LAST:
            loss.backward()
        else:
            text = message_of(loss.backward)
            assert f"ank {LAST} has not filled it (0 of its backward passes are reduced, " in text
            told = "in the next one 3 of 4 gradients are there, but not of parameter '0.weight' of"
            assert told in text
            assert f"ank{'s' * (SIZE > 2)} 0" not in text.partition("for other ranks.")[2]
            until_all_are_here()
        until_all_are_here()

    @pytest.mark.thorough
    def test_that_wait_for_another_module(self, views):
        """Two models in opposite orders: each rank waits where the other does not."""
        pair = [wrap(3, 4, 2, gradient_as_bucket_view=views) for _ in range(2)]
        losses = [loss_of(wrapped, draw()) for wrapped in pair]
        first = RANK == LAST
        text = message_of(losses[first].backward)
        others = [rank for rank in range(SIZE) if (rank == LAST) != first]
        with together():
            # Who has raised already does not wait any more.
            assert all(re.search(rf"ranks? (. and )?{rank}\b", text, re.I) for rank in others)
            assert "not filled it (0 of its backward passes are reduced" in text
            assert "not answer" not in text
        until_all_are_here()
        losses[1 - first].backward()
        until_all_are_here()

    def test_join(self):
        """Who has joined has filled its buckets with zeros."""
        from mpiddp.reducer import bucket_progress, joined

        wrapped = wrap(3, 4, 2)
        reducer = wrapped.reducer
        if RANK == LAST:
            joined.begin(reducer, SIZE)
        else:
            loss_of(wrapped, draw()).backward()
        until_all_are_here()
        text = bucket_progress.explain_missing(reducer, reducer.buckets[-1])
        until_all_are_here()
        joined.finish(reducer)
        with together():
            if RANK != LAST:
                assert "not filled it" in text  # of the next backward
            else:
                assert text == "All ranks have filled it: the connection is slow or has failed."

    @pytest.mark.thorough
    def test_module_that_others_do_not_know(self):
        wrapped = wrap(3, 4, 2)
        loss = loss_of(wrapped, draw())
        if RANK == 0:
            wrapped.process_group.modules.add(wrapped.reducer, "Sequential")
            text = message_of(loss.backward)
            assert "not filled it (it has no such module)" in text
        until_all_are_here()
        if RANK != 0:
            loss.backward()
        until_all_are_here()


def run(folder: Path, source: str, ranks: int, **env: str) -> str:
    """Run a script in which a rank must fail, and return what it printed to stderr."""
    script = folder / "script.py"
    script.write_text(
        "import sys, time\nfrom datetime import timedelta\n"
        "import torch, torch.distributed as dist, mpiddp\n"
        "from mpiddp import DistributedDataParallel as DDP\n"
        "import torch._dynamo\n"  # the wrapper does, in seconds of its own on a busy machine
        "mpiddp.init_process_group()\n"
        "rank = dist.get_rank()\n"
        "x = torch.ones(2, 4)\n"
        "dist.barrier()\n"
        "dist.group.WORLD.set_timeout(timedelta(seconds=2))\n" + source
    )
    done = mpirun.run(ranks, [script], timeout=90, env=env)
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    assert done.returncode != 0
    return done.stderr


@pytest.mark.thorough
@pytest.mark.timeout(110)
def test_two_modules_in_opposite_orders(tmp_path: Path) -> None:
    source = """
first, second = DDP(torch.nn.Linear(4, 4)), DDP(torch.nn.Linear(4, 1))
a, b = first(x).sum(), second(x).sum()
if rank == 0:
    a.backward()
else:
    b.backward()
time.sleep(30)
"""
    text = run(tmp_path, source, 2)
    # Whoever is the first ends the job, and finds the other waiting.
    error = re.search(r"\[rank(\d)\]: RuntimeError: rank \1: the all-reduce of (.*)", text)
    assert error
    rank = int(error[1])
    shapes = ["(4,)", "(1,)"]
    assert f"gradient bucket 0 (parameter 'bias' of shape {shapes[rank]}" in error[2]
    assert f"of wrapped module {rank + 1} (Linear) has waited 2 s" in error[2]
    other = 1 - rank
    assert f"Rank {other} has not filled it (0 of its backward passes are reduced, " in error[2]
    waits = f"it waits for gradient bucket 0 (parameter 'bias' of shape {shapes[other]}"
    assert waits in error[2]
    advice = "(Linear)). Where several wrapped modules are trained, all ranks run their backward"
    assert f"of wrapped module {other + 1} {advice}" in error[2]


@pytest.mark.thorough
@pytest.mark.timeout(110)
def test_rank_that_left_the_loop_and_one_that_ended(tmp_path: Path) -> None:
    source = """
wrapped = DDP(torch.nn.Linear(4, 4))
for step in range(2):
    loss = wrapped(x).sum()
    if rank == 0 or step == 0:
        loss.backward()
    elif rank == 2:
        sys.exit()
    else:
        time.sleep(30)
"""
    text = run(tmp_path, source, 3)
    assert "Rank 1 has not filled it (1 of its backward passes are reduced, 2 forward" in text
    assert re.search(r"rank 2 does not answer \(process \d+ on \S+ has left: its program", text)


@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.timeout(110)
def test_without_progress_thread(tmp_path: Path) -> None:
    source = """
wrapped = DDP(torch.nn.Linear(4, 4))
loss = wrapped(x).sum()
if rank == 0:
    loss.backward()
else:
    time.sleep(30)
"""
    text = run(tmp_path, source, 2, MPIDDP_PROGRESS_THREAD="0")
    assert "Rank 1 does not answer (process " in text
    assert "waits for no other rank, or waits inside of MPI: with MPIDDP_PROGRESS_THREAD=0" in text

"""Jobs that hang or end: the ranks' files are there, and torch's analyzer and ours name the fault.

Each test starts a job of its own, of real processes.
"""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import mpirun
import pytest
import torch
from script_runs import clean_environment

from mpiddp.torch_internals.versions import release_of

pytestmark = pytest.mark.timeout(100)

PREAMBLE = """\
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import mpiddp

mpiddp.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
dist.barrier()
dist.group.WORLD.set_timeout(timedelta(seconds=3))

def late(seconds=60):
    time.sleep(seconds)
"""


@dataclass
class Job:
    """A job that has ended, and what it has left."""

    folder: Path
    returncode: int
    stderr: str

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def analyze(self, *module: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *module, self.folder],
            capture_output=True, text=True, timeout=60, check=False, env=clean_environment(),
        )  # fmt: skip
        print(done.stdout, done.stderr)
        assert done.returncode == 0
        return done.stdout + done.stderr

    def in_words(self) -> str:
        return self.analyze("mpiddp.flight_recorder")

    def torch_says(self, *words: str) -> None:
        """Find `words` in what torch's analyzer says, if torch has one for CPUs."""
        if release_of(torch.__version__) >= (2, 12):
            analyzer = "torch.distributed.flight_recorder.fr_trace"
            told = self.analyze(analyzer, "--prefix", "trace_")
            assert all(each in told for each in words)


def run(folder: Path, source: str, ranks: int = 3) -> Job:
    script = folder / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(source))
    dumps = folder / "dumps"
    dumps.mkdir()
    env = {"TORCH_FR_DUMP_TEMP_FILE": f"{dumps}/trace_"}
    done = mpirun.run(ranks, [script], timeout=80, env=env)
    print(done.stdout, done.stderr)
    return Job(dumps, done.returncode, done.stderr)


@pytest.mark.essential
@pytest.mark.thorough
def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    job = run(
        tmp_path,
        """
        dist.broadcast(torch.ones(5), src=1)
        if rank == 1:
            late()
        dist.all_reduce(torch.ones(4))
        """,
    )
    assert job.returncode != 0
    assert job.files() == ["trace_0", "trace_1", "trace_2"]
    assert f"python -m mpiddp.flight_recorder {job.folder}" in job.stderr
    told = job.in_words()
    assert (
        "operation 3: all_reduce(SUM) of float32 (4,) on ranks 0 and 2, ranks 0 and 2 in it" in told
    )
    line = PREAMBLE.count("\n") + 5
    assert f"{tmp_path}/script.py:{line} in <module>" in told
    assert "Rank 1 has not begun it. Its last: 2, broadcast(root 1) of float32 (5,)" in told
    job.torch_says("Not all ranks joining collective, sequence number: 3", "missing ranks: {1}")


@pytest.mark.thorough
def test_ranks_that_are_not_in_the_group(tmp_path: Path) -> None:
    """They may be what the others wait for, so they write their files as well."""
    job = run(
        tmp_path,
        """
        part = dist.new_group([0, 1], timeout=timedelta(seconds=1))
        if rank == 0:
            try:
                dist.barrier(group=part)
            except RuntimeError:
                late(2)
        elif rank == 2:
            late(4)
        else:
            late(3)
        os._exit(0)
        """,
    )
    assert job.files() == ["trace_0", "trace_1", "trace_2"]


@pytest.mark.slow  # its siblings stay
def test_a_rank_that_calls_something_else(tmp_path: Path) -> None:
    job = run(
        tmp_path,
        """
        if rank == 2:
            dist.broadcast(torch.ones(7), src=0)
        else:
            dist.all_reduce(torch.ones(4))
            dist.all_reduce(torch.ones(4))
        late(6)
        """,
    )
    told = job.in_words()
    assert "The ranks have called different operations" in told
    assert "broadcast(root 0) of float32 (7,) on rank 2" in told
    # It takes the rank whose file it reads first for right.
    job.torch_says("Culprit rank", "COLLECTIVE_TYPE_MISMATCH")


@pytest.mark.thorough
def test_a_bucket_that_a_rank_does_not_fill(tmp_path: Path) -> None:
    job = run(
        tmp_path,
        """
        model = mpiddp.DistributedDataParallel(torch.nn.Linear(10, 1))
        for step in range(2):
            loss = model(torch.ones(1, 10)).sum()
            if (rank, step) == (0, 1):
                late()
            loss.backward()
        """,
    )
    assert job.returncode != 0
    told = job.in_words()
    assert "bucket 0 of backward pass 2 of Linear on ranks 1 and 2, ranks 1 and 2 in it" in told
    assert "Rank 0 has not begun it" in told
    job.torch_says("missing ranks: {0}")


@pytest.mark.slow
def test_a_message_that_nobody_sends(tmp_path: Path) -> None:
    job = run(
        tmp_path,
        """
        if rank == 0:
            dist.recv(torch.ones(1), src=2)
        else:
            late(6)
        """,
    )
    told = job.in_words()
    assert "messages from 2 to 0" in told
    assert "Rank 2 has not begun it" in told
    job.torch_says("missing ranks: {2}")


def test_an_abort(tmp_path: Path) -> None:
    """With something under way; without, the traceback says it all."""
    job = run(
        tmp_path,
        """
        if rank == 0:
            work = dist.all_reduce(torch.ones(4), async_op=True)
            raise ValueError("broken on purpose")
        late()
        """,
        ranks=2,
    )
    assert job.returncode != 0
    assert job.files() == ["trace_0"]
    assert "Rank 1 left no file" in job.in_words()


@pytest.mark.thorough
@pytest.mark.parametrize("handled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_signal_while_all_wait_inside_of_mpi(tmp_path: Path, handled: bool) -> None:
    """No thread runs Python then; a signal that the program handles is the program's."""
    pids = tmp_path / "pids"
    pids.mkdir()
    number = signal.SIGRTMIN + 6

    def send() -> None:
        deadline = time.monotonic() + 60
        while len(list(pids.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)
        for path in pids.iterdir():
            os.kill(int(path.name), number)

    thread = threading.Thread(target=send)
    thread.start()
    job = run(
        tmp_path,
        f"""
        import signal
        from mpi4py import MPI
        mpiddp.destroy_process_group()
        if {handled}:
            signal.signal({number}, lambda *_: None)
        mpiddp.init_process_group()
        dist.barrier()
        open(f"{pids}/{{os.getpid()}}", "w").close()
        if rank == 0:
            dist.send(torch.ones(1), dst=1)
            MPI.COMM_WORLD.recv(source=1)
        else:
            time.sleep(4)
            MPI.COMM_WORLD.send(None, dest=0)
            dist.recv(torch.ones(1), src=0)
        """,
        ranks=2,
    )
    thread.join()
    assert job.returncode == 0
    if handled:
        assert job.files() == []
        return
    assert job.files() == ["trace_0", "trace_1"]
    assert job.stderr.count("a signal asked for it: What this rank did last is in") == 2


@pytest.mark.once
def test_a_folder_that_holds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mpiddp.flight_recorder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{tmp_path} holds no file of a flight recorder" in done.stderr

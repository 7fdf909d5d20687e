"""What happens to the job when one rank fails, dies or stays away: it ends, at once, with a reason.

Each test starts a job of its own with mpirun.
"""

import re
import select
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import mpirun
import patience
import pytest

pytestmark = pytest.mark.timeout(100)

# Seconds from the failure to the end of the job, on a machine that is busy.
AT_ONCE = 15

PREAMBLE = """\
import os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
import mpiddp
from mpiddp import DistributedDataParallel as DDP


def note_the_time():
    with open(__file__ + ".failed", "w") as file:
        file.write(str(time.monotonic()))


def fail():
    # The others are where they wait by now.
    time.sleep(0.5)
    note_the_time()
    raise ValueError("broken on purpose")


torch.manual_seed(1)
torch.set_num_threads(1)
"""

INIT = """\
mpiddp.init_process_group(timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
"""


@dataclass
class Job:
    """A job that has ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds_after_failure: float

    @property
    def tracebacks(self) -> int:
        return self.stderr.count("Traceback (most recent call last)")


def run(folder: Path, source: str, ranks: int = 2, limit: float = 60) -> Job:
    """Run a script that calls note_the_time() where it fails."""
    script = folder / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(source))
    done = mpirun.run(ranks, [script], timeout=limit)
    ended = time.monotonic()
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    failed = folder / "script.py.failed"
    began = float(failed.read_text()) if failed.exists() else -1e9
    return Job(done.returncode, done.stdout, done.stderr, ended - began)


def assert_failed_together(
    job: Job, failing: int, said: str = "ValueError: broken on purpose"
) -> None:
    """Assert that the traceback of the failing rank, and no other, ended the job."""
    assert job.returncode != 0
    assert job.stderr.count(said) == 1
    assert job.tracebacks == 1
    assert f"[rank{failing}]: {said}" in job.stderr
    assert "still here" not in job.stdout
    assert job.seconds_after_failure < patience.enough(AT_ONCE)


# What the other ranks are doing when rank 1 fails.
OCCUPATIONS = {
    "waiting in backward": "wrapped(inputs).sum().backward()",
    "sleeping": "time.sleep(300)",
    "in an mpi4py barrier": "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()",
}


@pytest.mark.essential(keep=1)
@pytest.mark.smoke(keep=1)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "occupation",
    [
        pytest.param(code, id=name, marks=[pytest.mark.slow] * (name == "sleeping"))
        for name, code in OCCUPATIONS.items()
    ],
)
def test_exception_ends_the_job_while_others_are(tmp_path: Path, occupation: str) -> None:
    job = run(
        tmp_path,
        INIT
        + f"""
wrapped = DDP(torch.nn.Linear(4, 4))
inputs = torch.ones(2, 4)
wrapped(inputs).sum().backward()
if rank == 1:
    print("printed before")  # to a buffer: stdout is no terminal
    fail()
{occupation}
print("still here")
""",
    )
    assert_failed_together(job, failing=1)
    assert job.stdout.count("printed before") == 1


@pytest.mark.thorough
def test_exception_on_the_rank_whose_buffers_the_others_wait_for(tmp_path: Path) -> None:
    job = run(
        tmp_path,
        INIT
        + """
wrapped = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
if rank == 0:
    fail()
wrapped(torch.ones(2, 4))
print("still here")
""",
    )
    assert_failed_together(job, failing=0)


@pytest.mark.thorough
def test_exception_inside_backward(tmp_path: Path) -> None:
    job = run(
        tmp_path,
        INIT
        + """
class Fragile(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        if rank == 1:
            fail()
        return gradient


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.last(Fragile.apply(self.first(x)))


# A bucket for each parameter: those of the last layer are under way when it fails.
wrapped = DDP(Model(), bucket_cap_mb_list=[1e-6])
wrapped(torch.ones(2, 4)).sum().backward()
print("still here")
""",
    )
    assert_failed_together(job, failing=1)


@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.parametrize("ended", [False, True], ids=["world of one", "after its end"])
def test_exception_is_python_s_own(tmp_path: Path, ended: bool) -> None:
    """Nobody waits for this process: it ends as any other would."""
    source = INIT
    if ended:
        source += "mpiddp.destroy_process_group()\n"
        source += "assert sys.excepthook is sys.__excepthook__\n"
    job = run(tmp_path, source + "fail()\n", ranks=1)
    assert job.returncode == 1
    assert job.tracebacks == 1
    assert job.stderr.count("ValueError: broken on purpose") == 1
    assert "abort" not in job.stderr.lower()


@pytest.mark.thorough
def test_abort_waits_until_the_launcher_has_read_what_was_printed(tmp_path: Path) -> None:
    source = "import sys; from mpiddp.mpi.abort import abort_job; print('last words'); abort_job(3)"
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    with process:
        select.select([process.stdout], [], [], 60)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        assert process.stdout.readline() == b"last words\n"
        assert process.wait(20) != 0


@pytest.mark.thorough
def test_own_excepthook_is_still_called(tmp_path: Path) -> None:
    job = run(
        tmp_path,
        """
def hook(kind, error, traceback):
    print(f"my own hook saw {kind.__name__}: {error}", file=sys.stderr)


sys.excepthook = hook
"""
        + INIT
        + """
if rank == 1:
    fail()
dist.barrier()
print("still here")
""",
    )
    assert job.returncode != 0
    assert job.stderr.count("my own hook saw ValueError: broken on purpose") == 1
    assert job.tracebacks == 0
    assert "still here" not in job.stdout
    assert job.seconds_after_failure < patience.enough(AT_ONCE)


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("transport", ["auto", "exchange", "mpi"], ids="over {}".format)
def test_killed_rank_ends_the_job(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDDP_TRANSPORT", transport)
    job = run(
        tmp_path,
        INIT
        + """
wrapped = DDP(torch.nn.Linear(4, 4))
if rank == 0:
    time.sleep(0.5)
    note_the_time()
    os.kill(os.getpid(), signal.SIGKILL)
wrapped(torch.ones(2, 4)).sum().backward()
print("still here")
""",
    )
    assert job.returncode != 0
    assert "still here" not in job.stdout
    assert job.seconds_after_failure < patience.enough(AT_ONCE)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("transport", "thread"),
    [
        pytest.param("auto", "1", id="thread"),
        pytest.param("auto", "0", id="no thread", marks=pytest.mark.slow),
        pytest.param("exchange", "1", id="exchange", marks=pytest.mark.slow),
    ],
)
def test_backward_on_one_rank_less(
    tmp_path: Path, transport: str, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDDP_TRANSPORT", transport)
    monkeypatch.setenv("MPIDDP_PROGRESS_THREAD", thread)
    job = run(
        tmp_path,
        """
mpiddp.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
wrapped = DDP(model, bucket_cap_mb_list=[1e-6])
dist.barrier()
dist.group.WORLD.set_timeout(timedelta(seconds=2))
for step in range(3 if rank == 0 else 2):
    note_the_time()
    wrapped(torch.ones(2, 4)).sum().backward()
if rank == 0:
    print("still here")
""",
    )
    assert job.returncode != 0
    assert job.tracebacks == 1
    error = re.search(r"\[rank0\]: RuntimeError: .*", job.stderr)
    assert error
    # Bucket, parameter, rank and time; and what may have caused it.
    assert "bucket 0 (parameter '1.bias' of shape (4,))" in error[0]
    assert "rank 0: " in error[0]
    assert "waited 2 s" in error[0]
    assert "skipped this backward" in error[0]
    assert "still here" not in job.stdout
    assert 2 <= job.seconds_after_failure < patience.enough(2 + AT_ONCE)


@pytest.mark.thorough
def test_forward_on_one_rank_less(tmp_path: Path) -> None:
    job = run(
        tmp_path,
        """
mpiddp.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
wrapped = DDP(torch.nn.BatchNorm1d(4))
wrapped(torch.ones(2, 4)).sum().backward()
dist.barrier()
dist.group.WORLD.set_timeout(timedelta(seconds=2))
note_the_time()
if rank != 0:
    wrapped(torch.ones(2, 4))
    print("still here")
else:
    time.sleep(100)
""",
    )
    assert job.returncode != 0
    assert job.tracebacks == 1
    error = re.search(r"\[rank1\]: RuntimeError: .*", job.stderr)
    assert error
    assert "rank 1 of 2: broadcast" in error[0]
    assert "waited 2 s" in error[0]
    assert "still here" not in job.stdout
    assert 2 <= job.seconds_after_failure < patience.enough(2 + AT_ONCE)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "waiting",
    [
        "wrapped(torch.ones(2, 4)).sum().backward()",
        pytest.param("dist.barrier()", marks=pytest.mark.slow),
    ],
)
def test_keyboard_interrupt_ends_the_wait_for_a_missing_rank(tmp_path: Path, waiting: str) -> None:
    job = run(
        tmp_path,
        INIT
        + f"""
wrapped = DDP(torch.nn.Linear(4, 4))
if rank == 1:
    time.sleep(100)


def interrupt():
    note_the_time()
    os.kill(os.getpid(), signal.SIGINT)


threading.Timer(1, interrupt).start()
{waiting}
print("still here")
""",
    )
    assert job.returncode == 130
    assert job.tracebacks == 1
    assert "[rank0]: KeyboardInterrupt" in job.stderr
    assert "still here" not in job.stdout
    assert job.seconds_after_failure < patience.enough(AT_ONCE)

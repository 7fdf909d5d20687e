"""A rank that has ended without MPI: the others of its node end the job, where no launcher does.

Both launchers can be told to leave the job alone when a process dies, as `srun` does by default.
"""

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import mpirun
import pytest

pytestmark = pytest.mark.timeout(100)

# Seconds from the death to the end of the job: the ranks notice it within one, and leave the
# launcher some time; this machine is busy.
AT_ONCE = 12

PREAMBLE = """\
import os, sys, time
import torch
import torch.distributed as dist
import mpiddp

mpiddp.init_process_group()
rank = dist.get_rank()
model = mpiddp.DistributedDataParallel(torch.nn.Linear(10, 1))
part = dist.new_group([0, 2])
dist.barrier()

def die(by_signal):
    open(__file__ + ".died", "w").write(f"{time.time()}")
    # After a signal MPICH's launcher may lose what the others print.
    os.kill(os.getpid(), 9) if by_signal and "Open MPI" in VERSION else os._exit(3)
"""


def run(folder: Path, source: str) -> "tuple[subprocess.CompletedProcess[str], float]":
    """Run a script on 3 ranks; return what came of it, and the seconds since die() was called."""
    script = folder / "script.py"
    launcher = mpirun.find()
    done = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False)
    version = "Open MPI" if "Open MPI" in done.stdout else "MPICH"
    leave_alone = "--continuous" if version == "Open MPI" else "-disable-auto-cleanup"
    script.write_text(f"VERSION = {version!r}\n{PREAMBLE}{textwrap.dedent(source)}")
    command = [launcher, leave_alone, "-n", "3", sys.executable, os.fspath(script)]
    done = mpirun.run_command(command, timeout=60)
    print(done.stdout, done.stderr)
    died = folder / "script.py.died"
    return done, time.time() - float(died.read_text()) if died.exists() else 0.0


@pytest.mark.parametrize(
    ("by_signal", "waits", "said"),
    [
        pytest.param(True, "dist.all_reduce(torch.ones(3))", "all_reduce(SUM) of float32 (3,)"),
        pytest.param(
            False,
            "model(torch.ones(1, 10)).sum().backward()",
            "bucket 0 of backward pass 1 of Linear",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            True, "dist.recv(torch.ones(1), src=1)", "recv of float32 (1,)", marks=pytest.mark.slow
        ),
    ],
    ids=["collective", "bucket", "message"],
)
def test_ends_the_job(tmp_path: Path, by_signal: bool, waits: str, said: str) -> None:
    done, seconds = run(
        tmp_path,
        f"""
        if rank == 1:
            die({by_signal})
        {waits}
        print("still here")
        """,
    )
    assert "still here" not in done.stdout
    assert seconds < AT_ONCE
    line = re.search(
        r"mpiddp: rank [02]: rank 1 \(process \d+ on \S+\) (.*), and this rank waits for its part "
        rf"of {re.escape(said)} of group '.*'\. The job ends",
        done.stderr,
    )
    assert line is not None
    # Linux tells only once the launcher has asked for the exit status.
    known = "was ended by SIGKILL" if by_signal else "has ended with status 3"
    assert line[1] in (known, "has ended", "has ended with status 3")


@pytest.mark.slow  # its siblings stay
def test_others_go_on_where_nobody_waits_for_it(tmp_path: Path) -> None:
    """It ends without MPI, and the others work in a group of their own."""
    done, _ = run(
        tmp_path,
        """
        if rank == 1:
            die(by_signal=False)
        work = dist.all_reduce(torch.ones(3), group=part, async_op=True)
        for _ in range(8):
            time.sleep(0.5)
            dist.all_reduce(torch.ones(3), group=part)
        print("all well", flush=True)
        os._exit(0)
        """,
    )
    assert done.stdout.count("all well") == 2
    assert "The job ends" not in done.stderr


@pytest.mark.slow  # its siblings stay
def test_a_rank_that_ends_properly_is_not_missed(tmp_path: Path) -> None:
    done, _ = run(
        tmp_path,
        """
        if rank == 1:
            sys.exit(0)
        for _ in range(8):
            time.sleep(0.5)
            dist.all_reduce(torch.ones(3), group=part)
        print("all well", flush=True)
        """,
    )
    assert done.returncode == 0
    assert done.stdout.count("all well") == 2
    assert "The job ends" not in done.stderr

"""What is said of ranks of this node that answer no question: whether they run, what they did last.

Each test starts a job of its own.
"""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import mpirun
import pytest

from mpiddp.transports import gpu_trial
from mpiddp.watch import node_states

pytestmark = pytest.mark.timeout(100)

START = """\
import ctypes, os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import mpiddp

mpiddp.init_process_group()
rank = dist.get_rank()
pids = [None] * dist.get_world_size()
model = mpiddp.DistributedDataParallel(torch.nn.Linear(10, 1))
for _ in range(3):
    model(torch.ones(1, 10)).sum().backward()
dist.broadcast(torch.ones(5), src=1)
dist.group.WORLD.set_timeout(timedelta(seconds=5))


def hold_the_gil():
    ctypes.PyDLL(None).sleep(30)


def stop():
    if os.fork() == 0:
        time.sleep(10)
        os.kill(os.getppid(), signal.SIGCONT)  # so that the job can end
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
"""

LAST = (
    r"the last it began was broadcast\(root 1\) of float32 \(5,\), #\d+ of group '0' \(ended \d+ s "
    r"ago\), and before that bucket 0 of backward pass 3 of Linear \(ended \d+ s ago\)"
)


def run(folder: Path, source: str, ranks: int, **env: str) -> str:
    """Run a script in which ranks fail; return what they said."""
    script = folder / "script.py"
    script.write_text(START + textwrap.dedent(source))
    done = mpirun.run(ranks, [script], timeout=80, env={"MPIDDP_STALL_SECONDS": "2", **env})
    print(done.stdout, done.stderr)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.thorough
def test_a_rank_that_is_stopped_and_one_that_holds_the_gil(tmp_path: Path) -> None:
    """Both in the stall's line, and in the error at the end."""
    said = run(
        tmp_path,
        """
        if rank == 1:
            stop()
        elif rank == 2:
            hold_the_gil()
        else:
            dist.all_reduce(torch.ones(4))
        """,
        3,
    )
    stopped = (
        rf"[Rr]ank 1 does not answer \(process \d+ on \S+ is stopped, as by SIGSTOP or scontrol "
        rf"suspend: state T in /proc/\d+/stat; {LAST}\)"
    )
    held = (
        r"rank 2 does not answer \(process \d+ on \S+ sleeps outside Python, or without letting "
        rf"other threads of Python run: state S in /proc/\d+/stat; {LAST}\)"
    )
    both = f"{stopped}; {held}"
    stalls = [line for line in said.splitlines() if "It goes on waiting" in line]
    errors = [line for line in said.splitlines() if "its timeout is over" in line]
    assert stalls
    assert re.search(both, stalls[0])
    assert errors
    assert re.search(both, errors[0])


@pytest.mark.slow
def test_an_operation_that_has_not_ended(tmp_path: Path) -> None:
    said = run(
        tmp_path,
        """
        if rank == 1:
            dist.all_reduce(torch.ones(4), async_op=True)
            hold_the_gil()
        else:
            model(torch.ones(1, 10)).sum().backward()
        """,
        2,
    )
    assert re.search(
        r"[Rr]ank 1 does not answer .*; the last it began was all_reduce\(SUM\) of float32 \(4,\), "
        r"#\d+ of group '0' \(not ended, begun \d+ s ago\), and before that bucket 0",
        said,
    )


@pytest.mark.slow  # test_losses and test_stopped_jobs have the like
def test_without_a_thread(tmp_path: Path) -> None:
    """Those that wait look themselves: the line of a stall, of ranks that answer and others."""
    said = run(
        tmp_path,
        """
        if rank == 2:
            hold_the_gil()
        elif rank == 1:
            dist.broadcast(torch.ones(5), src=2)
        else:
            dist.all_reduce(torch.ones(4))
        """,
        3,
        MPIDDP_PROGRESS_THREAD="0",
    )
    stalls = [line for line in said.splitlines() if "It goes on waiting" in line]
    assert stalls
    assert re.search(
        r"rank 2 does not answer \(process \d+ on \S+ waits for no other rank, or waits inside "
        r"of MPI: with MPIDDP_PROGRESS_THREAD=0 ranks answer only while they wait elsewhere; "
        rf"{LAST}\)",
        stalls[0],
        re.IGNORECASE,
    )


def test_a_process_whose_name_is_no_text() -> None:
    """The kernel cuts names after 15 bytes, which may be inside of a letter."""
    source = (
        "import ctypes, time\n"
        "PR_SET_NAME = 15\n"
        r"ctypes.CDLL(None).prctl(PR_SET_NAME, b'other) \xc3')"
        "\n"
        "print(flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert Path(f"/proc/{process.pid}/comm").read_bytes() == b"other) \xc3\n"
            assert node_states._stat(process.pid)[0] in ("R", "S")
            assert gpu_trial._session(process.pid) == [process.pid]
            assert mpirun._session(process.pid) == [process.pid]
        finally:
            process.kill()

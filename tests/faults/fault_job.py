"""Start a job that meets a fault, and see how it ends and what it leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import mpirun
from script_runs import SCRIPTS

__all__ = ["Outcome", "run", "shared_files"]

_NAP = 0.05
_MARK = "MPIDDP_TEST_JOB"
# What Open MPI and MPICH leave behind when they are killed is not ours to judge.
_OF_MPI = ("sm_segment", "vader_segment", "mpich_sh", "ucx_shm", "nvshmem")


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        status: of its launcher.
        said: all that it printed.
        seconds: from the fault until no process was left; None: some had to be killed.
    """

    status: int
    said: str
    seconds: float | None


def run(
    fault: str, moment: str, folder: Path, limit: float, ranks: int, gloo: bool = False
) -> Outcome:
    """Run fault.py; after `limit` seconds from the fault, kill what is left.

    With mpirun, or with torchrun and torch's own class on Gloo.
    """
    arguments = [str(each) for each in (SCRIPTS / "fault.py", fault, moment, folder)]
    command = [mpirun.find(), "-n", str(ranks), sys.executable, *arguments]
    if gloo:
        runner = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*runner, "--nproc-per-node", str(ranks), *arguments, "gloo"]
    environment = {**os.environ, **mpirun.ENVIRONMENT, "MPIDDP_STALL_SECONDS": "2"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    # By it the job's processes are known, in whatever session a launcher puts them.
    environment[_MARK] = str(folder)
    with open(folder / "said", "w+b") as said:
        launcher = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=environment,
            start_new_session=True,
        )
        began = time.monotonic()
        try:
            seconds = _watch(launcher, folder, limit)
        finally:
            for process in _processes(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            status = launcher.wait()
    fault_began = _fault_began(folder) or began
    ended = None if seconds is None else seconds - fault_began
    text = (folder / "said").read_text(errors="replace")
    return Outcome(status, text, ended)


def _watch(launcher: subprocess.Popen[bytes], folder: Path, limit: float) -> float | None:
    """Return when the last process had ended, on the monotonic clock; None: too late."""
    # Starting takes some seconds of each core.
    deadline = time.monotonic() + 60
    met = False
    while launcher.poll() is None or _processes(folder):
        time.sleep(_NAP)
        if not met and _fault_began(folder):
            met = True
            deadline = time.monotonic() + limit
        if launcher.poll() is None and (folder / "kill-launcher").exists():
            launcher.kill()
        if time.monotonic() > deadline:
            return None
    return time.monotonic()


def _processes(folder: Path) -> list[int]:
    """Return the processes of a job that still run."""
    found = []
    mark = f"{_MARK}={folder}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            # Empty, of one that has ended and is not waited for.
            if mark in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def _fault_began(folder: Path) -> float | None:
    try:
        return float((folder / "began").read_text())
    except (OSError, ValueError):
        return None


def shared_files() -> set[str]:
    """Return the names of files in shared memory, without those of MPI libraries themselves."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(_OF_MPI)}

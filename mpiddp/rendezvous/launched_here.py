"""Which processes a launcher has started on this node for this job, and what Linux knows of them.

For before a world begins: a rank that has not come may not even have imported mpiddp. One that
waits puts up a sign for the others of its node, as in system/rank_signs.py: a memfd.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpiddp import launchers
from mpiddp.system import memory_files
from mpiddp.watch.node_states import STATES

__all__ = ["LaunchedProcess", "find", "put_up_sign"]

_NAME = "mpiddp-waits"
_TARGET = f"/memfd:{_NAME} (deleted)"
_PROC = Path("/proc")
_MOST_CHARACTERS = 160  # of a command line


@dataclass(frozen=True)
class LaunchedProcess:
    """A process of this job on this node.

    Attributes:
        number: its number here.
        waits: whether it has put up the sign.
        has_mpi: whether an MPI library is loaded in it.
        began: in ticks since the machine started.
        state: its letter in /proc/NUMBER/stat.
        command: its command line, as far as it is shown.
    """

    number: int
    waits: bool
    has_mpi: bool
    began: int
    state: str
    command: str

    def __str__(self) -> str:
        doing = {"R": "runs", "S": "sleeps"}.get(self.state) or STATES.get(self.state, "is alive")
        return f"process {self.number} on {socket.gethostname()}, which {doing}: {self.command}"


def put_up_sign() -> int:
    """Say that this process waits; return a descriptor to be closed, or -1. Not collective."""
    try:
        descriptor = memory_files.create(_NAME)
    except OSError:
        return -1
    with contextlib.suppress(OSError):
        os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def find() -> dict[int, LaunchedProcess]:
    """Return the job's processes on this node, by the rank that the launcher has named.

    Not collective. A shell, the Python that it started and the children of that have one rank's
    variables: it is the one that waits, else the first with MPI in it, else the first.
    """
    found: dict[int, list[LaunchedProcess]] = {}
    own_job = _job(os.getpid(), os.environ)
    for folder in _PROC.iterdir():
        # Other users' do not let us look, and processes end while we do.
        with contextlib.suppress(OSError, ValueError, IndexError):
            number = int(folder.name)
            if folder.stat().st_uid != os.getuid():
                continue
            environment = _environment(folder)
            rank = launchers.told_rank(environment)
            if rank is not None and _job(number, environment) == own_job:
                process = _look_at(folder)
                found.setdefault(int(rank), []).append(process)
    return {
        rank: min(each, key=lambda one: (not one.waits, not one.has_mpi, one.began))
        for rank, each in found.items()
    }


def _look_at(folder: Path) -> LaunchedProcess:
    fields = _stat(int(folder.name))
    command = (folder / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
    text = command.decode(errors="replace")
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}..."
    return LaunchedProcess(
        number=int(folder.name),
        waits=_waits(folder),
        has_mpi="/libmpi" in (folder / "maps").read_text(errors="replace"),
        began=int(fields[19]),
        state=fields[0],
        command=text,
    )


def _waits(folder: Path) -> bool:
    for each in (folder / "fd").iterdir():
        # A forked child has its parent's.
        if os.readlink(each) == _TARGET and each.read_bytes() == folder.name.encode():
            return True
    return False


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment with which a process began."""
    data = (folder / "environ").read_bytes().decode(errors="replace")
    return dict(each.split("=", 1) for each in data.split("\0") if "=" in each)


def _job(number: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return what the processes of one job have in common."""
    if "PMIX_NAMESPACE" in environment:
        return (environment["PMIX_NAMESPACE"],)
    launcher = _launcher_above(number)
    if launcher:
        return (str(launcher),)
    return tuple(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))


def _launcher_above(number: int) -> int:
    """Return the process of mpirun or its kin below which a process is, 0 if there is none."""
    while number > 1:
        text = (_PROC / str(number) / "stat").read_text(errors="replace")
        if text.partition("(")[2].startswith(launchers.PROGRAMS):
            return number
        number = int(_stat(number)[1])
    return 0


def _stat(number: int) -> list[str]:
    """Return the fields of /proc/NUMBER/stat that follow the name."""
    return (_PROC / str(number) / "stat").read_text(errors="replace").rpartition(")")[2].split()

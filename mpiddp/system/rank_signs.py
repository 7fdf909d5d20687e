"""The sign of a process that is a rank, for this user's other processes on the host.

It is a memfd with the process's own number, its rank, where it writes its records to, and where in
it others can read what it does. /proc shows it to the user's other processes, nothing is left of it
when the process ends, and programs that it executes do not inherit it. A forked child does; the
number in it is its parent's. Whoever reads signs need import neither torch nor an MPI.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpiddp.system import memory_files
from mpiddp.version import __version__

__all__ = ["PROC", "process_ids", "put_up", "rank_of", "sign_of", "status_of", "take_down"]

PROC = Path("/proc")

_NAME = "mpiddp-rank"
_TARGET = f"/memfd:{_NAME} (deleted)"
_MOST_BYTES = 1 << 14


def put_up(number: int, rank: int, path: str, world: Mapping[str, Any] | None = None) -> int:
    """Say that this process writes to `path` at a signal; return a descriptor, or -1.

    Not collective.

    Args:
        number: of the signal; 0: it listens to none.
        rank: this process's in the world.
        path: of its file.
        world: what `mpiddp.top` needs to know; None: it has come to no world yet.
    """
    told = {
        "process": os.getpid(),
        "signal": number,
        "rank": rank,
        "path": path,
        "version": __version__,
        "world": world,
    }
    try:
        descriptor = memory_files.create(_NAME)
    except OSError:
        return -1
    try:
        os.write(descriptor, json.dumps(told).encode())
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def take_down(descriptor: int) -> None:
    """Take back `put_up`, whose result is given. Not collective."""
    if descriptor >= 0:
        os.close(descriptor)


def process_ids() -> list[int]:
    """Return the numbers of all processes that /proc shows, in order. Not collective."""
    return sorted(int(each.name) for each in PROC.iterdir() if each.name.isdigit())


def rank_of(process_id: int) -> int | None:
    """Return the rank of a process of this user, None if it is none. Not collective."""
    with contextlib.suppress(OSError):
        rank: int | None = sign_of(process_id).get("rank")
        return rank
    return None


def sign_of(process_id: int) -> dict[str, Any]:
    """Return what the sign of a process of this user says, {} if it has none of its own.

    Not collective. Of two, that of its world: the other one is from before that.

    Raises:
        OSError: there is no such process, or it may not be looked at.
    """
    folder = PROC / str(process_id)
    if os.stat(folder).st_uid != os.getuid():
        return {}
    found: dict[str, Any] = {}
    for each in (folder / "fd").iterdir():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            # A process that hides from debuggers looks like root's, but its memory does not.
            if os.readlink(each) == _TARGET and os.stat(each).st_uid == os.getuid():
                said: dict[str, Any] = json.loads(each.read_bytes()[:_MOST_BYTES])
                if said["process"] == _own_number(process_id) and not found.get("world"):
                    found = said
    return found


def status_of(process_id: int) -> dict[str, str]:
    """Return the lines of /proc/PID/status by their names. Not collective.

    Raises:
        OSError: there is no such process.
    """
    # The name of a process, of 15 bytes, may end within a character.
    text = (PROC / str(process_id) / "status").read_text(errors="replace")
    lines = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in lines}


def _own_number(process_id: int) -> int:
    """Return what a process believes its number to be: in a container another one."""
    return int(status_of(process_id).get("NSpid", str(process_id)).split()[-1])

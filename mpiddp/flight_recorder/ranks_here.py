"""Find this user's ranks of mpiddp on this host, and ask them to write their records.

Each rank puts up a sign: a memfd with its own number and where it writes to. /proc shows it to the
user's other processes, nothing is left of it when the process ends, and programs that it executes
do not inherit it. A forked child does; the number in it is its parent's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddp.system import memory_files

__all__ = ["Rank", "ask", "find", "put_up_sign", "rank_of", "take_down_sign"]

_NAME = "mpiddp-rank"
_TARGET = f"/memfd:{_NAME} (deleted)"
_MOST_BYTES = 1 << 13
_PROC = Path("/proc")


@dataclass(frozen=True)
class Rank:
    """A process that takes the signal.

    Attributes:
        process_id: its number here.
        rank: in its world.
        signal: the number that it listens to.
        path: of the file that it writes.
        command: its command line.
    """

    process_id: int
    rank: int
    signal: int
    path: str
    command: str


def put_up_sign(number: int, rank: int, path: str) -> int:
    """Say that this process writes to `path` at a signal; return a descriptor, or -1.

    Not collective.

    Args:
        number: of the signal; 0: it listens to none.
        rank: this process's in the world.
        path: of its file.
    """
    told = {"process": os.getpid(), "signal": number, "rank": rank, "path": path}
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


def take_down_sign(descriptor: int) -> None:
    """Take back `put_up_sign`, whose result is given. Not collective."""
    if descriptor >= 0:
        os.close(descriptor)


def find(pattern: str = "") -> list[Rank]:
    """Return the ranks of this user on this host, by process. Not collective.

    Args:
        pattern: a regular expression that is found in their command lines.
    """
    wanted = re.compile(pattern)
    numbers = sorted(int(each.name) for each in _PROC.iterdir() if each.name.isdigit())
    found = []
    for process_id in numbers:
        # Other users' do not let us look, and processes end while we do.
        with contextlib.suppress(OSError):
            command = (_PROC / str(process_id) / "cmdline").read_bytes()
            text = command.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
            sign = _sign_of(process_id) if wanted.search(text) else {}
            if _listens(process_id, sign):
                found.append(Rank(process_id, sign["rank"], sign["signal"], sign["path"], text))
    return found


def rank_of(process_id: int) -> int | None:
    """Return the rank of a process of this user, None if it is none. Not collective."""
    with contextlib.suppress(OSError):
        rank: int | None = _sign_of(process_id).get("rank")
        return rank
    return None


def ask(rank: Rank) -> str:
    """Send the signal; return in words why it is not sent, "" if it is. Not collective."""
    try:
        # A number cannot come to be another process's while its descriptor is open.
        descriptor = os.pidfd_open(rank.process_id)
    except OSError as error:
        return error.strerror or str(error)
    try:
        if not _listens(rank.process_id, _sign_of(rank.process_id)):
            return "it has ended, or takes no signal any more"
        signal.pidfd_send_signal(descriptor, rank.signal)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(descriptor)
    return ""


def _sign_of(process_id: int) -> dict[str, Any]:
    """Return what the sign of a process says, {} if it has none of its own."""
    folder = _PROC / str(process_id)
    if os.stat(folder).st_uid != os.getuid():
        return {}
    for each in (folder / "fd").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.readlink(each) == _TARGET:
                said: dict[str, Any] = json.loads(each.read_bytes()[:_MOST_BYTES])
                if said["process"] == _own_number(process_id):
                    return said
    return {}


def _status(process_id: int) -> Iterator[tuple[str, str]]:
    # The name of a process, of 15 bytes, may end within a character.
    text = (_PROC / str(process_id) / "status").read_text(errors="replace")
    for line in text.splitlines():
        name, _, value = line.partition(":")
        yield name, value.strip()


def _own_number(process_id: int) -> int:
    """Return what a process believes its number to be: in a container another one."""
    numbers = dict(_status(process_id)).get("NSpid", str(process_id))
    return int(numbers.split()[-1])


def _listens(process_id: int, sign: dict[str, Any]) -> bool:
    """Return whether a process catches the signal of its sign: others may end by it."""
    number = sign.get("signal", 0)
    if number <= 0:
        return False
    caught = int(dict(_status(process_id))["SigCgt"], 16)
    return bool(caught >> (number - 1) & 1)

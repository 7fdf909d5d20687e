"""Find this user's ranks of mpiddp on this host, and ask them to write their records."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass
from typing import Any

from mpiddp.system import rank_signs

__all__ = ["Rank", "ask", "find"]


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


def find(pattern: str = "") -> list[Rank]:
    """Return the ranks of this user on this host, by process. Not collective.

    Args:
        pattern: a regular expression that is found in their command lines.
    """
    wanted = re.compile(pattern)
    found = []
    for process_id in rank_signs.process_ids():
        # Other users' do not let us look, and processes end while we do.
        with contextlib.suppress(OSError):
            command = (rank_signs.PROC / str(process_id) / "cmdline").read_bytes()
            text = command.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
            sign = rank_signs.sign_of(process_id) if wanted.search(text) else {}
            if _listens(process_id, sign):
                found.append(Rank(process_id, sign["rank"], sign["signal"], sign["path"], text))
    return found


def ask(rank: Rank) -> str:
    """Send the signal; return in words why it is not sent, "" if it is. Not collective."""
    try:
        # A number cannot come to be another process's while its descriptor is open.
        descriptor = os.pidfd_open(rank.process_id)
    except OSError as error:
        return error.strerror or str(error)
    try:
        if not _listens(rank.process_id, rank_signs.sign_of(rank.process_id)):
            return "it has ended, or takes no signal any more"
        signal.pidfd_send_signal(descriptor, rank.signal)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(descriptor)
    return ""


def _listens(process_id: int, sign: dict[str, Any]) -> bool:
    """Return whether a process catches the signal of its sign: others may end by it."""
    number = sign.get("signal", 0)
    if number <= 0:
        return False
    caught = int(rank_signs.status_of(process_id)["SigCgt"], 16)
    return bool(caught >> (number - 1) & 1)

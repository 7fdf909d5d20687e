"""What /proc tells of a process: its state, processor time and memory, and its command line."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mpiddp.system.rank_signs import PROC

__all__ = ["Usage", "command_of", "usage_of"]

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """What a process uses.

    Attributes:
        state: a letter, as in /proc/PID/stat.
        began: ticks since the machine started; another process may get its number later.
        age: seconds since then.
        processor: seconds of processor time that all its threads have used.
        memory: bytes that it has in memory, with those that it shares.
    """

    state: str
    began: int
    age: float
    processor: float
    memory: int


def usage_of(process_id: int) -> Usage:
    """Return what a process uses. Not collective.

    Raises:
        OSError: there is no such process.
    """
    text = (PROC / str(process_id) / "stat").read_text(errors="replace")
    fields = text.rpartition(")")[2].split()  # the name before may hold any bytes
    began = int(fields[19])
    with open(PROC / "uptime") as file:
        up = float(file.read().split()[0])
    return Usage(
        fields[0],
        began,
        max(up - began / _TICKS, 0.0),
        (int(fields[11]) + int(fields[12])) / _TICKS,
        int(fields[21]) * _PAGE_BYTES,
    )


def command_of(process_id: int) -> str:
    """Return a command line. Not collective.

    Raises:
        OSError: there is no such process.
    """
    words = (PROC / str(process_id) / "cmdline").read_bytes().rstrip(b"\0")
    return words.replace(b"\0", b" ").decode(errors="replace")

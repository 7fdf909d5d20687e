"""Which rank has failed first: its traceback is shown, of those that fail after it a line.

Note [One traceback]
~~~~~~~~~~~~~~~~~~~~
What fails on one rank often raises on all of them: ranks that construct different models, a group
that is broken, a connection that has closed. Launchers mix what ranks print (`srun` in pieces of
1 KB), and end a rank in the middle of it because another one has aborted the job. So the rank that
fails first shows its traceback, and aborts the job. The others say in a line what they have raised
and where, and then wait for a while, so that it can end them.

Who is first in a node is decided by a lock on a file in memory that its ranks have in common; in it
stands the rank. Other nodes learn of it with Note [Whose end was first]. Where they all raise at
once, ranks of other nodes than rank 0's wait for a moment, so that its node is first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time

__all__ = ["UNKNOWN", "begin", "claim", "end", "known", "note"]

# No rank is known.
UNKNOWN = -1

# The rank that was first, and 1.
_FIRST = struct.Struct("=i")

# Seconds that word from the node of rank 0 takes, and that a rank needs to write its number.
_FROM_FIRST_NODE, _NUMBER_COMES = 0.03, 0.05
_NAP = 1e-3

# This rank; the file, -1 for none; and whether rank 0 has another one.
_rank = _file = -1
_apart = False


def begin(rank: int, process: int, descriptor: int, apart: bool) -> None:
    """Share a file in memory with the ranks of this node. Not collective.

    Args:
        rank: this one.
        process: the number of the one that has made the file, which lives.
        descriptor: of the file there; -1: there is none. This process closes its own.
        apart: whether rank 0 is on another node.
    """
    end()
    if process != os.getpid() and descriptor >= 0:
        try:
            descriptor = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # some sandboxes
            descriptor = -1
    _set(rank, descriptor, apart)


def end() -> None:
    """Forget the file. Not collective."""
    file = _file
    _set(-1, -1, False)
    if file >= 0:
        os.close(file)


def claim() -> int | None:
    """Return None if this rank is the first to fail, else which one was. Not collective."""
    if _file < 0:
        return None
    if _apart:
        time.sleep(_FROM_FIRST_NODE)
    if not _lock():
        deadline = time.monotonic() + _NUMBER_COMES
        while (first := _read()) is None and time.monotonic() < deadline:
            time.sleep(_NAP)
        return UNKNOWN if first is None else first
    # A process that has ended has no lock any more.
    first = _read()
    if first is None or first == _rank:
        _write(_rank)
        return None
    return first


def note(rank: int) -> None:
    """Take from another node that a rank there was first. Not collective."""
    if rank != UNKNOWN and _file >= 0 and _lock():
        if _read() is None:
            _write(rank)
        with contextlib.suppress(OSError):
            fcntl.lockf(_file, fcntl.LOCK_UN)


def known() -> int:
    """Return which rank was the first to fail, UNKNOWN if none was. Not collective."""
    first = _read()
    return UNKNOWN if first is None else first


def _set(rank: int, descriptor: int, apart: bool) -> None:
    global _rank, _file, _apart
    _rank, _file, _apart = rank, descriptor, apart


def _lock() -> bool:
    try:
        fcntl.lockf(_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read() -> int | None:
    with contextlib.suppress(OSError):
        found = os.pread(_file, _FIRST.size, 0)
        if len(found) == _FIRST.size and (number := _FIRST.unpack(found)[0]):
            return int(number) - 1
    return None


def _write(rank: int) -> None:
    with contextlib.suppress(OSError):
        os.pwrite(_file, _FIRST.pack(rank + 1), 0)

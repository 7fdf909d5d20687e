"""One writer at a time in a folder of checkpoints: two jobs would remove what the other writes.

A lock of the file system, which goes with the process that holds it. Its file says who that is, and
is there as long as somebody writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

__all__ = ["only_writer"]

_NAME = ".lock"
# A file system may have no locks: Lustre by default, some of NFS. On a full one there is no place
# for the file, and what is left over there can be removed only by who goes on.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def only_writer(root: Path) -> Iterator[None]:
    """Within, no other process writes to `root`, which is made where it is missing.

    Not collective. Where the file system has no locks, nothing is looked at.

    Raises:
        BlockingIOError: another one writes.
    """
    root.mkdir(parents=True, exist_ok=True)
    path = root / _NAME
    descriptor = None
    try:
        descriptor = _locked(path)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield
    except FileNotFoundError as error:
        if descriptor is not None:
            raise
        raise FileNotFoundError(
            f"{error}. Does another job save into {root}? Each needs a folder of its own, and the "
            f"file system has no locks, which would say so"
        ) from error
    finally:
        if descriptor is not None:
            _unlock(descriptor, path)


def _locked(path: Path) -> int:
    """Return the descriptor of the file, once it is locked. Not collective."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if _lock(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    """Lock the file and write down who does; return whether it is still there."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
        raise BlockingIOError(
            f"{holder} is saving into {path.parent} too. Two jobs need a folder each: a save "
            f"removes what looks left over. If that process has ended, remove {path}"
        ) from None
    try:
        if not os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return False
    except FileNotFoundError:
        return False
    job = os.environ.get("SLURM_JOB_ID")
    of_job = f" of SLURM's job {job}" if job else ""
    holder = f"process {os.getpid()} on {socket.gethostname()}{of_job}"
    with contextlib.suppress(OSError):  # the disk is full
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
    return True


def _unlock(descriptor: int, path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()  # first: nobody may lock a file that is about to go
    with contextlib.suppress(OSError):
        # Not only by closing it: a process forked meanwhile has it open as well.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)

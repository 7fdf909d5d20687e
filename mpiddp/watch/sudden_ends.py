"""Say at once which rank of this node a signal has ended.

Open MPI's launcher ends the other ranks within milliseconds, and names rank 0 whichever it was. So
a thread waits for the ends of processes, and writes its line before anything else. The lowest rank
that is left speaks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

from mpiddp import settings
from mpiddp.mpi.abort import is_ending

__all__ = ["SuddenEnds", "exit_status"]

# By these a launcher, or a user, ends ranks: whoever gets them first need not be the cause.
_ON_PURPOSE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Seconds in which a launcher asks for the status of a process that has ended; before, nobody knows.
_PATIENCE = 0.05

# struct pidfd_info of linux/pidfd.h: the mask, 52 bytes of other facts, the exit status.
_INFORMATION = struct.Struct("=Q52xi")
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)


def exit_status(descriptor: int) -> int | None:
    """Return how the process of a pidfd has ended, as `os.waitpid` does; None: nobody knows.

    Not collective. Linux tells from 6.15 on, once the process that has started it has asked.
    """
    information = bytearray(_INFORMATION.size)
    _INFORMATION.pack_into(information, 0, _PIDFD_INFO_EXIT, 0)
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, information)
    except OSError:
        return None
    mask, status = _INFORMATION.unpack(information)
    return status if mask & _PIDFD_INFO_EXIT else None


class SuddenEnds:
    """Waits, in a thread, for the ends of the other ranks of this node. Not collective.

    Args:
        rank: this one.
        peers: of each other rank the number of its process, and a pidfd, which stays open until
            `stop`.

    Attributes:
        on_end: called in the thread when one has ended, however it did.
    """

    def __init__(self, rank: int, peers: Mapping[int, tuple[int, int]]) -> None:
        self._rank, self._peers = rank, dict(peers)
        self._thread: threading.Thread | None = None
        self.on_end: Callable[[], None] | None = None
        if not peers or settings.PROGRESS_THREAD.read() is False:
            return
        self._reading, self._writing = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="mpiddp sudden ends", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Not collective."""
        if self._thread is not None:
            os.write(self._writing, b"e")  # closing it would not do: forked processes have it, too
            self._thread.join()
            os.close(self._writing)
            os.close(self._reading)
            self._thread = None

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        ranks = {descriptor: rank for rank, (_, descriptor) in self._peers.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        living = set(ranks.values())
        while True:
            ended = [descriptor for descriptor, _ in poll.poll()]
            if self._reading in ended:
                return
            if self.on_end is not None:
                self.on_end()
            for descriptor in ended:
                poll.unregister(descriptor)
                living.discard(ranks[descriptor])
            if self._rank < min(living, default=self._rank + 1):
                for descriptor in ended:
                    self._tell(ranks[descriptor], descriptor)

    def _tell(self, rank: int, descriptor: int) -> None:
        """Say so, if a signal has ended a rank that nobody ends on purpose."""
        until = time.monotonic() + _PATIENCE
        while (status := exit_status(descriptor)) is None and time.monotonic() < until:
            time.sleep(2e-4)
        if status is None or not os.WIFSIGNALED(status) or is_ending():
            return
        number = os.WTERMSIG(status)
        if number not in _ON_PURPOSE:
            process, _ = self._peers[rank]
            words = (
                f"mpiddp: rank {rank} (process {process} on {socket.gethostname()}) was ended by "
                f"{signal.Signals(number).name}\n"
            )
            with contextlib.suppress(OSError):
                os.write(2, words.encode())

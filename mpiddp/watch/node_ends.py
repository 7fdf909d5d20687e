"""Say at once that the first rank of a neighbouring node has ended, before the launcher ends us.

Note [Whose end was first]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Open MPI ends a rank whose connection to another one has closed, and names itself or rank 0: of a
rank that is alone on its host nobody would be told. So a thread reads the connections of Note [A
ring of nodes], and writes its line as soon as one closes.

Launchers end all ranks when one has failed, on one host earlier than on another. These ends close
connections, too, and nobody is to name them. So whoever knows why the job ends sounds a bell: a
rank that is about to abort the job, and the first rank of a node one of whose ranks has ended. The
first rank of the node hears it, by a pipe that the others of its node can write to, and passes it
on around the ring. A bell that has sounded once stays so: who hears it says nothing any more. Only
what ends all ranks from outside, such as `scancel`, sounds none.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp.mpi import first_words
from mpiddp.mpi.abort import is_ending

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.watch.ring_connections import Place

__all__ = ["LEAVING", "Bell", "Link", "NodeEnds", "closed_words"]

# Sent by a rank that leaves properly, and by one that has heard that the job ends; which rank was
# the first to fail follows, see Note [One traceback].
LEAVING, TOLD = b"l", b"t"
_FIRST = struct.Struct("=i")
_STOP = b"s"

# Seconds that the node behind in the ring waits for the one before, which speaks at once.
_PATIENCE_BEHIND = 0.03
# Seconds that another thread needs at most to write a byte.
_LOCKED = 0.1


@dataclass
class Link:
    """The connection with the first rank of the next node, or of the one before.

    Attributes:
        connection: by TCP.
        place: the rank at its other end.
        patience: in seconds, before a loss ends the job.
        index: 0: this rank speaks first, if that one ends.
        closed: by the end of the rank; else its whole node may be lost.
        lost: when, on the monotonic clock; 0: it lives, or has left properly.
    """

    connection: socket.socket
    place: Place
    patience: float
    index: int
    closed: bool = False
    lost: float = 0.0


class Bell:
    """Whether somebody knows why the job ends. Collective over `node`, a node's ranks.

    Attributes:
        reading: where the first rank hears it; -1 on the others.
    """

    def __init__(self, node: MPI.Comm) -> None:
        self.reading = self._writing = -1
        self._lock = threading.Lock()
        name = ""
        if node.Get_rank() == 0:
            self.reading, self._writing = os.pipe()
            os.set_blocking(self._writing, False)
            name = f"/proc/{os.getpid()}/fd/{self._writing}"
        pipe = node.bcast((name, _identity(self._writing)))
        if node.Get_rank() > 0:
            # In a container of its own it finds another file there, or none.
            with contextlib.suppress(OSError):
                descriptor = os.open(pipe[0], os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                if _identity(descriptor) == pipe[1]:
                    self._writing = descriptor
                else:
                    os.close(descriptor)
        node.Barrier()  # until then the first rank's process lives

    def sound(self, what: bytes = TOLD) -> None:
        """Let all ranks know that why the job ends is said. Not collective; in any thread."""
        with self._lock, contextlib.suppress(OSError):  # nobody reads it any more
            if self._writing >= 0:
                os.write(self._writing, what)

    def close(self) -> None:
        """Give its descriptors back. Not collective."""
        # In a forked process another thread's lock is never given back.
        locked = self._lock.acquire(timeout=_LOCKED)
        for descriptor in (self.reading, self._writing):
            if descriptor >= 0:
                os.close(descriptor)
        self.reading = self._writing = -1
        if locked:
            self._lock.release()


class NodeEnds:
    """Reads, in a thread, what comes from the nodes beside this one. Not collective.

    Args:
        links: to them; what becomes of them is written there.
        bell: of this node.
    """

    def __init__(self, links: Sequence[Link], bell: Bell) -> None:
        self._links = {link.connection.fileno(): link for link in links}
        self._bell = bell
        self._told = False
        # Whose ends are not said, and when this rank says it. The first of them may be what the
        # others came of.
        self._closed: list[Link] = []
        self._speaks = math.inf
        self._thread = threading.Thread(target=self._watch, name="mpiddp node ends", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Not collective."""
        self._bell.sound(_STOP)
        self._thread.join()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._bell.reading, select.POLLIN)
        for descriptor in self._links:
            poll.register(descriptor, select.POLLIN)
        while True:
            wait = max(0.0, self._speaks - time.monotonic()) * 1e3
            for descriptor, _ in poll.poll(None if math.isinf(wait) else wait):
                if descriptor == self._bell.reading:
                    if _STOP in os.read(descriptor, 4096):
                        return
                    self._tell()
                elif not self._read(self._links[descriptor]):
                    poll.unregister(descriptor)
            self._say()

    def _read(self, link: Link) -> bool:
        """Read one byte; return whether more may come."""
        try:
            said = link.connection.recv(1)
        except OSError:  # silent; or reset by a node that has started anew, or a firewall
            link.lost = time.monotonic()
            return False
        if said == TOLD:
            with contextlib.suppress(OSError, struct.error):  # it has ended meanwhile
                number = link.connection.recv(_FIRST.size, socket.MSG_WAITALL)
                first_words.note(_FIRST.unpack(number)[0])
            self._tell(link)
            return True
        if said != LEAVING:
            link.closed, link.lost = True, time.monotonic()
            self._closed.append(link)
            self._speaks = min(self._speaks, link.lost + _PATIENCE_BEHIND * (link.index > 0))
        return False

    def _tell(self, source: Link | None = None) -> None:
        """Say nothing any more, and let the other nodes do the same."""
        if self._told:
            return
        self._told = True
        said = TOLD + _FIRST.pack(first_words.known())
        for link in self._links.values():
            if link is not source and not link.lost:
                with contextlib.suppress(OSError):  # it has ended, or takes nothing
                    link.connection.send(said, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def _say(self) -> None:
        """Say which rank has ended, if it is time, and nobody has said more."""
        if time.monotonic() < self._speaks:
            return
        if not self._told and not is_ending():
            words = f"mpiddp: {closed_words(self._closed[0].place)}\n"
            with contextlib.suppress(OSError):
                os.write(2, words.encode())
            self._tell()
        self._speaks = math.inf


def closed_words(place: Place) -> str:
    """Return in words that a rank has ended."""
    return (
        f"rank {place.rank} (process {place.process_id} on {place.host}) has ended: its connection "
        f"has closed"
    )


def _identity(descriptor: int) -> tuple[int, int]:
    if descriptor < 0:
        return 0, 0
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino

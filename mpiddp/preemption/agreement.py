"""Let all ranks stop at the same step, without a message as long as nobody wants to stop.

Note [Agreement]
~~~~~~~~~~~~~~~~
Every rank counts its checks, one a step. Ranks are in different steps, and none may stop where
another one has gone on: its gradients would be waited for. So

1. the rank that is to stop tells the first rank, the leader;
2. the leader asks all. Each answers with its last check, and from then on holds: its next check
   waits for the decision;
3. once all have answered, the leader tells them the check at which they stop: the one after the
   largest that it was told. Nobody has passed that, because all hold.

Messages are looked for by the thread that also answers the roll call, wherever the program is,
and by a check that waits. A rank that leaves says so, and is asked no more; if the leader leaves,
all go on without end. The leader tells all others that a rank has left: nobody waits for it when
the communicator is freed, and who gives up waiting leaves as well, since others may still hold.

The two waits, for the decision and for all to free the communicator, are records of the flight
recorder: the watchdog says who is missing, and ends the job after the world's time limit. A rank
has come to the first when it holds, not only when its next check waits: its thread has answered.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpiddp.engine.engine import look_at_others
from mpiddp.mpi import communicators, losses
from mpiddp.system import running_time

if TYPE_CHECKING:
    from mpiddp.watch.forming_group import NamedWait

__all__ = ["Agreement"]

# Tags. To the leader: that this rank is to stop, which check it was at, that it leaves. From it:
# the question, and the decision.
_WANTED, _ASKED, _ANSWERED, _DECIDED, _LEFT = range(1, 6)
_CHECK = struct.Struct("<q")
# A check that nobody reaches.
_NEVER = 2**62
# Seconds between two looks for the decision.
_NAP = 0.002


class Agreement:
    """One agreement on one check. Collective over `communicator`.

    Args:
        communicator: of all ranks; it is duplicated.
        held: the wait for the decision.
        freed: the wait for all to free it.
    """

    def __init__(self, communicator: MPI.Intracomm, held: NamedWait, freed: NamedWait) -> None:
        self._held, self._freed = held, freed
        self._communicator = communicator.Dup()
        self._communicator.Set_name("mpiddp preemption")
        self._communicator.Set_errhandler(MPI.ERRORS_RETURN)
        self._rank, self._size = self._communicator.Get_rank(), self._communicator.Get_size()
        self._lock = threading.RLock()
        self._wanted = self._told = self._asked = False
        self._checks = 0
        self._holding = False
        self._decided = _NEVER
        # The leader's: the last check of each rank that has answered or left.
        self._answers: dict[int, int] = {}
        self._leaving: list[tuple[MPI.Request, bytes]] = []
        # By rank, how many messages went there and came from there.
        self._sent, self._received = [0] * self._size, [0] * self._size
        self._ending = False
        # Whether a rank has ended without `free`, and, the leader's, whether all know it.
        self._left = self._left_is_told = False

    def want(self) -> None:
        """Ask to stop soon. Not collective; it may be called in a signal handler."""
        self._wanted = True

    @property
    def is_wanted(self) -> bool:
        """Whether this rank knows that one has asked to stop. Not collective."""
        return self._wanted or self._holding or self._decided != _NEVER

    def check(self) -> bool:
        """Return whether to stop here; every rank asks equally often. Not collective."""
        if self._size == 1 and self._wanted:
            self.look()  # alone, no thread does
        with self._lock:
            self._checks += 1
            holding = self._holding
        if holding and self._decided == _NEVER:
            with self._held.recorded():
                while self._holding and self._decided == _NEVER:
                    self.look(waiting=True)
                    time.sleep(_NAP)
        return self._checks >= self._decided

    def look(self, waiting: bool = False) -> None:
        """Take in the messages that have come, and send what is due. Not collective.

        Args:
            waiting: whether it is for the decision, which never comes where a rank is lost.
        """
        with self._lock:
            if self._communicator == MPI.COMM_NULL:
                return
            try:
                self._take_in()
                self._send_what_is_due()
            except MPI.Exception:  # of a rank that has ended
                if waiting and losses.can_go_on():
                    raise
            self._leaving = [sent for sent in self._leaving if not sent[0].Test()]

    def leave(self) -> None:
        """Answer no more: this process ends, or waits for nobody. Not collective."""
        with self._lock, contextlib.suppress(MPI.Exception):
            if self._rank == 0:
                self._decide(_NEVER)
                self._tell_that_one_left()
            else:
                self._send(0, _LEFT, self._checks)

    def free(self) -> None:
        """Free the communicator once nobody waits for an answer. Collective.

        If a rank has ended without it, the communicator keeps its number.
        """
        everyone_is_here = self._communicator.Ibarrier()
        self._freed.enter()
        clock = running_time.Clock()
        with self._freed.recorded():
            while not everyone_is_here.Test():
                self.look()
                if self._left:
                    with self._lock:
                        self.leave()
                        self._ending = True
                    self._unfinished = everyone_is_here
                    return
                look_at_others(clock)
                time.sleep(_NAP)
        with self._lock:
            self._ending = True
            # A message that nobody takes would reach the next communicator that gets this one's
            # number, as MPICH gives them.
            coming = self._communicator.alltoall(self._sent)
            while self._received != coming:
                self._take_in()
                time.sleep(_NAP)
            MPI.Request.Waitall([request for request, _ in self._leaving])
            communicators.free(self._communicator)

    def _take_in(self) -> None:
        status = MPI.Status()
        while self._communicator.Iprobe(tag=MPI.ANY_TAG, status=status):
            rank, tag = status.Get_source(), status.Get_tag()
            data = bytearray(_CHECK.size)
            self._communicator.Recv([data, MPI.BYTE], source=rank, tag=tag)
            self._received[rank] += 1
            (value,) = _CHECK.unpack(data)
            if tag == _WANTED:
                self._wanted = True
            elif tag == _ASKED:
                self._hold()
                self._send(0, _ANSWERED, self._checks)
            elif tag == _DECIDED:
                self._decided, self._holding = value, False
            elif tag == _ANSWERED or rank not in self._answers:
                self._answers[rank] = value
            self._left |= tag == _LEFT
        if self._rank == 0 and self._left:
            self._tell_that_one_left()

    def _send_what_is_due(self) -> None:
        if not self._wanted or self._ending:
            return
        if self._rank:
            if not self._told:
                self._told = True
                self._send(0, _WANTED)
            return
        if not self._asked:
            self._asked = True
            self._hold()
            self._answers[0] = self._checks
            for rank in range(1, self._size):
                if rank not in self._answers:
                    self._send(rank, _ASKED)
        if self._decided == _NEVER and len(self._answers) == self._size:
            self._decide(max(self._answers.values()) + 1)

    def _hold(self) -> None:
        self._holding = True
        self._held.enter()

    def _tell_that_one_left(self) -> None:
        if not self._left_is_told:
            self._left_is_told = True
            for rank in range(1, self._size):
                self._send(rank, _LEFT, _NEVER)

    def _decide(self, check: int) -> None:
        self._decided, self._holding = check, False
        for rank in range(1, self._size):
            self._send(rank, _DECIDED, check)

    def _send(self, rank: int, tag: int, value: int = 0) -> None:
        if self._ending:
            return
        self._sent[rank] += 1
        data = _CHECK.pack(value)
        request = self._communicator.Isend([data, MPI.BYTE], dest=rank, tag=tag)
        self._leaving.append((request, data))

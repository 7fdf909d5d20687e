"""Compare the monotonic clocks of all ranks, by messages.

Note [Clocks]
~~~~~~~~~~~~~
A rank asks another one for its time, many times. The answer was given at some moment between the
question and the arrival, so the middle of the two is wrong by half of that time at most; the
shortest round trip counts. The first rank of each node asks rank 0, then the others of the node ask
the first, all nodes at once: the errors of the two add up. It is done at the beginning and at the
end of a trace, and between them the offset is taken to change evenly.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpiddp.engine.engine import look_at_others
from mpiddp.system import running_time

if TYPE_CHECKING:
    from mpiddp.mpi.nodes import Topology

__all__ = ["Clock", "Meeting", "Offset"]

# Round trips of a pair of ranks, and the seconds of one after which no shorter one is looked for.
_FEWEST, _MOST = 10, 100
_SHORT = 8e-6
# Where ranks share a core, most trips take as long as the others' turns. If none was as short as
# this, in seconds, there are more, for as many seconds: of a pair, and of all together.
_LONG, _PAIR, _ALL = 100e-6, 0.5, 5.0
_TIME = struct.Struct("<dd")
_NAP = 100e-6
# Tests of a message before another process gets the core: an answer from another core comes sooner.
_SPINS = 30
# Tests of a message without a look at whether the other ranks still live.
_TESTS = 2000
_TAG = 1
# Bytes of what a rank says to rank 0.
_TEXT = 1000


@dataclass(frozen=True)
class Offset:
    """What to add to this rank's clock to get rank 0's, at one moment.

    Attributes:
        moment: on this rank's clock, in seconds.
        seconds: the offset.
        error: how wrong it can be, in seconds.
    """

    moment: float
    seconds: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class Clock:
    """The clock of all ranks, as this one knows it.

    Attributes:
        origin: rank 0's clock at the beginning of the trace: 0 in the files.
        began: the offset at the beginning.
        ended: and at the end, None where a rank has ended without the others.
    """

    origin: float
    began: Offset
    ended: Offset | None

    def drift(self) -> float:
        """Return by how many seconds the offset changes in a second. Not collective."""
        if self.ended is None or self.ended.moment <= self.began.moment:
            return 0.0
        return (self.ended.seconds - self.began.seconds) / (self.ended.moment - self.began.moment)

    def error(self) -> float:
        """Return how wrong the offset can be where it was measured, in seconds. Not collective."""
        return max(self.began.error, 0.0 if self.ended is None else self.ended.error)

    def microseconds(self, moment: float) -> float:
        """Return a moment of this rank as it is in the files. Not collective."""
        offset = self.began.seconds + self.drift() * (moment - self.began.moment)
        return (moment + offset - self.origin) * 1e6


class Meeting:
    """What the ranks do together at both ends of a trace. Collective over `communicator`.

    Nothing waits for longer than until `deadline`, on this rank's monotonic clock: then
    TimeoutError is raised, and the ranks can meet no more.
    """

    def __init__(self, communicator: MPI.Intracomm, topology: Topology) -> None:
        self._communicator = communicator
        self._rank = communicator.Get_rank()
        members = communicator.allgather((topology.node_rank, topology.local_rank))
        self._leaders = [rank for rank, (_, local) in enumerate(members) if local == 0]
        here = [rank for rank, (node, _) in enumerate(members) if node == topology.node_rank]
        self._leader = next(rank for rank in here if rank in self._leaders)
        self._others = [rank for rank in here if rank != self._leader]
        self.deadline = math.inf

    def come(self) -> None:
        """Wait for all ranks, in a way that looks for lost ones. Collective."""
        self._finish(self._communicator.Ibarrier(), nap=True)

    def origin(self) -> float:
        """Return rank 0's time now, on all ranks. Collective."""
        told: float = self._communicator.bcast(time.monotonic())
        return told

    def measure(self) -> Offset:
        """Return this rank's offset to rank 0. Collective."""
        own = Offset(time.monotonic())
        if self._rank == self._leader:
            own = self._among(0, [rank for rank in self._leaders if rank != 0]) or own
        mine = self._among(self._leader, self._others)
        # The leader's own offset holds for all of its node.
        if mine is None:
            for rank in self._others:
                self._send(rank, own.seconds, own.error)
            return own
        seconds, error = self._receive(self._leader)
        return Offset(mine.moment, mine.seconds + seconds, mine.error + error)

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks on rank 0, [] elsewhere. Collective."""
        data = text.encode()[:_TEXT].ljust(_TEXT)
        if self._rank:
            self._finish(self._communicator.Isend([data, MPI.BYTE], 0, _TAG))
            return []
        told = [text]
        for rank in range(1, self._communicator.Get_size()):
            memory = bytearray(_TEXT)
            self._finish(self._communicator.Irecv([memory, MPI.BYTE], rank, _TAG), nap=True)
            told.append(memory.decode(errors="replace").rstrip())
        return told

    def _among(self, asked: int, asking: list[int]) -> Offset | None:
        """Let `asking` ask `asked` for its time, one after the other; return what it was told."""
        if self._rank == asked:
            for other in asking:
                self._send(other, 0.0, 0.0)  # it is its turn
                is_last = False
                while not is_last:
                    is_last = self._receive(other)[0] == 1.0
                    self._send(other, time.monotonic(), 0.0)
        elif self._rank in asking:
            return self._ask(asked, min(_PAIR, _ALL / len(asking)))
        return None

    def _ask(self, other: int, seconds: float) -> Offset:
        self._receive(other, nap=True)
        best = Offset(0.0, 0.0, math.inf)
        until = time.monotonic() + seconds
        for trip in itertools.count(1):
            best_trip = 2 * best.error
            is_last = (trip > _FEWEST and best_trip <= _SHORT) or (
                trip >= _MOST and (best_trip <= _LONG or time.monotonic() > until)
            )
            answer = bytearray(_TIME.size)
            coming = self._communicator.Irecv([answer, MPI.BYTE], other, _TAG)
            began = time.monotonic()
            self._send(other, float(is_last), 0.0)
            self._finish(coming)
            half = (time.monotonic() - began) / 2
            if half < best.error:
                best = Offset(began + half, _TIME.unpack(answer)[0] - began - half, half)
            if is_last:
                break
        return best

    def _send(self, other: int, first: float, second: float) -> None:
        self._finish(self._communicator.Isend([_TIME.pack(first, second), MPI.BYTE], other, _TAG))

    def _receive(self, other: int, nap: bool = False) -> tuple[float, float]:
        memory = bytearray(_TIME.size)
        self._finish(self._communicator.Irecv([memory, MPI.BYTE], other, _TAG), nap)
        first, second = _TIME.unpack(memory)
        return first, second

    def _finish(self, request: MPI.Request, nap: bool = False) -> None:
        clock: running_time.Clock | None = None
        tests = 0
        while not request.Test():
            tests += 1
            if nap:
                time.sleep(_NAP)
            elif tests % _SPINS == 0:
                os.sched_yield()  # where ranks share a core, the other one can answer
            if nap or tests % _TESTS == 0:
                clock = clock or running_time.Clock()
                look_at_others(clock)
                if time.monotonic() > self.deadline:
                    raise TimeoutError("other ranks have not come")

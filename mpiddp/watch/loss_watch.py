"""Look for lost ranks in a thread that calls no MPI.

Note [MPI that does not return]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Over libfabric's provider "tcp", MPICH 5 sends to a process that has ended by connecting to it again
and again, for ever, inside of MPI_Isend or the beginning of a collective, and with the lock that
all calls of MPI need (seen under srun, where no launcher ends the job). Then no thread of this
process gets anything out of MPI: not the one of roll_call.py, which answers and watches. So what
needs no MPI has a thread of its own: the ends of processes of this node (dead_peers.py), the
connections between nodes (heartbeat.py), and whether roll call's thread comes back from MPI. Ranks
that are known to have ended are not asked (`RollCall.lost`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mpiddp import settings
from mpiddp.flight_recorder import files, ring
from mpiddp.flight_recorder.call_text import place
from mpiddp.flight_recorder.sources import known
from mpiddp.flight_recorder.torch_format import words_of
from mpiddp.mpi.abort import abort_job
from mpiddp.system import running_time

if TYPE_CHECKING:
    from mpiddp.watch.roll_call import RollCall

__all__ = ["Asker", "LossWatch"]

# Seconds between two looks.
_PERIOD = 0.5
# Seconds after which a look of roll call's thread is one that MPI does not let return.
_LONGEST_LOOK = 10.0
# What a look counts at most: in more seconds since the last one this process did not run.
_LONGEST = 2.0
# Seconds that it may take to ask a rank.
_LONGEST_QUESTION = 5.5
# Seconds after the time limit in which an error may be raised, or the watchdog may end the job.
_GRACE = 12.0


class _Question:
    """Whether a rank answers, for a thread that calls no MPI."""

    def __init__(self, rank: int) -> None:
        self.rank, self.answers = rank, False
        self.is_done = threading.Event()


class Asker:
    """Lets roll call's thread ask ranks for another thread. Not collective."""

    def __init__(self, roll_call: RollCall) -> None:
        self._roll_call = roll_call
        self._questions: list[_Question] = []
        roll_call.watches.append(self._look)

    def answers(self, rank: int) -> bool:
        """Return whether a rank answers; while MPI does not return, none does. Not collective."""
        question = _Question(rank)
        self._questions.append(question)
        if question.is_done.wait(_LONGEST_QUESTION):
            return question.answers
        return running_time.now() - self._roll_call.looked < _LONGEST_LOOK

    def _look(self) -> None:
        while self._questions:
            question = self._questions.pop()
            question.answers = self._roll_call.answers(question.rank)
            question.is_done.set()


class LossWatch:
    """Watches for one process, if roll call has a thread. Not collective.

    Args:
        rank: this one.
        roll_call: of the same world.
        looks: called twice a second, here or, where there is no thread, by ranks that wait.
    """

    def __init__(self, rank: int, roll_call: RollCall, looks: Sequence[Callable[[], None]]) -> None:
        self._rank, self._roll_call, self._looks = rank, roll_call, looks
        self._stall: float = settings.STALL_SECONDS.read()
        # Seconds for which roll call's thread has not come back, as far as this one ran.
        self._looked, self._away, self._now = roll_call.looked, 0.0, time.monotonic()
        self._told = False
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        if roll_call.threaded:
            self._thread = threading.Thread(
                target=self._watch, name="mpiddp loss watch", daemon=True
            )
            self._thread.start()
        else:
            roll_call.watches += looks

    def stop(self) -> None:
        """End the thread. Not collective."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        from mpi4py import MPI

        while not self._ending.wait(_PERIOD):
            for look in self._looks:
                with contextlib.suppress(MPI.Exception):  # where a loss ends what is under way
                    look()
            self._look_at_roll_call()

    def _look_at_roll_call(self) -> None:
        """Say that MPI does not return, and end the job when the time limit is over."""
        now = time.monotonic()
        elapsed, self._now = min(now - self._now, _LONGEST), now
        if self._roll_call.looked != self._looked:
            self._looked, self._away, self._told = self._roll_call.looked, 0.0, False
            return
        self._away += elapsed
        if self._away < _LONGEST_LOOK:
            return
        # Messages too: here one waits inside of MPI.
        record = next((each for each in ring.snapshot() if each[8] == 0), None)
        source = None if record is None else known().get(record[1])
        if record is None or source is None:
            return
        limit = self._limit_of(source.number)
        is_over = self._away > limit + _GRACE
        if not is_over and (self._told or self._away < self._stall):
            return
        self._told = True
        then = f"It goes on waiting, until {limit + _GRACE:g} s are over"
        if is_over:
            then = f"The time limit of {limit:g} s is over, and the job ends"
        words = (
            f"mpiddp: rank {self._rank}: MPI has not returned for {self._away:.0f} s in or beside "
            f"{words_of(record, source)}, so this rank can ask no other one: one that it sends to "
            f"may be lost (this rank is {place() or 'in a library'}). {then}"
        )
        if is_over:
            words += f". {files.dump_for(words)}"
            abort_job(1, lambda: print(words.rstrip(), file=sys.stderr, flush=True))
        with contextlib.suppress(Exception):  # a stream that takes nothing
            print(words, file=sys.stderr, flush=True)

    def _limit_of(self, number: int) -> float:
        """Return the time limit of the group that a source belongs to."""
        groups = self._roll_call.groups()
        for group in groups:
            if number == group.source.number or any(
                number == module.record_source for module in group.modules.all()
            ):
                return group.timeout.total_seconds()
        return max((group.timeout.total_seconds() for group in groups), default=0.0)

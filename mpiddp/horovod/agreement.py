"""The ranks of one process set agree on what to start, by small messages.

Note [Who drives the agreement]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Submissions wait in a list until somebody calls `progress`: whoever waits for a result, or asks for
it, and the thread of mpiddp.horovod.progress. That sends what this rank has submitted to the
coordinator, in one message; at the coordinator it takes the messages of all, and sends out what it
decides; everywhere it starts what was decided, and finishes what is complete. A lock lets one
thread at a time do so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpiddp.engine import forks
from mpiddp.horovod.coordinator import (
    ENDED,
    FAIL,
    JOINED,
    LEFT,
    RUN,
    Coordinator,
    Decision,
    Request,
)
from mpiddp.horovod.environment import Settings
from mpiddp.horovod.errors import HorovodInternalError
from mpiddp.horovod.execution import Running, Submission, start

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.horovod.timeline import Timeline
    from mpiddp.process_group.group import ProcessGroup

__all__ = ["Agreement"]

logger = logging.getLogger("mpiddp.horovod")

_COORDINATOR = 0
# Seconds that a waiting rank yields before it sleeps; how long it sleeps at most; how often the
# coordinator looks for stalls.
_YIELD = 2e-3
_LONGEST_NAP = 1e-3
_STALL_LOOKS = 0.25
# Seconds for which a rank that ends tries to say so.
_GOODBYE = 1.0


class Agreement:
    """What this rank has submitted to one process set, and how far it has come.

    Collective over `communicator`; its methods are not, unless they say so.

    Args:
        communicator: of the set's ranks, for the messages; whoever made it frees it.
        ranks: the ranks as hvd.rank() counts them, for texts.
        group: the process group of the same ranks, which runs the operations.
        settings: of Horovod.
        wake: called when something has been submitted.
    """

    def __init__(
        self,
        communicator: MPI.Intracomm,
        ranks: Sequence[int],
        group: ProcessGroup,
        settings: Settings,
        wake: Callable[[], None],
    ) -> None:
        self.group = group
        self.timeline: Timeline | None = None
        self._communicator = communicator
        self._rank, self._size = communicator.Get_rank(), communicator.Get_size()
        self._ranks = list(ranks)
        self._wake = wake
        self._lock = threading.RLock()
        self._waiting: dict[str, Submission] = {}
        self._running: list[Running] = []
        self._outbox: list[Request] = []
        self._sends: list[MPI.Request] = []
        self._counts: dict[str, int] = {}
        self._joins = 0
        self._ended = False
        self._closed = False
        self._gone = ""
        self._lost = False
        self._drivers = 0
        self._coordinator: Coordinator | None = None
        if self._rank == _COORDINATOR:
            self._coordinator = Coordinator(ranks, settings)
        self._next_look = 0.0

    @property
    def busy(self) -> bool:
        """Whether this rank has something under way."""
        return bool(self._waiting or self._running or self._outbox or self._sends)

    @property
    def closed(self) -> bool:
        """Whether this rank has left, and receives no message any more."""
        return self._closed

    @property
    def driven(self) -> bool:
        """Whether somebody calls `progress` already, again and again."""
        return self._drivers > 0

    @property
    def coordinates(self) -> bool:
        """Whether this rank decides for others."""
        return self._coordinator is not None and self._size > 1

    def unnamed(self, kind: str) -> str:
        """Return a name for an operation without one: they match by their order.

        The ranks count anew when all have joined: until then some have submitted more than others.
        """
        with self._lock:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            return f"noname.{self._joins}.{number}" if self._joins else f"noname.{number}"

    def submit(self, submission: Submission) -> None:
        """Take an operation; the ranks start it when all have submitted it.

        Raises:
            HorovodInternalError: Horovod was shut down.
            ValueError: one of this name waits already.
        """
        key = submission.request.key
        forks.check(key)
        with self._lock:
            if self._ended:
                raise HorovodInternalError(f"{key}: Horovod has been shut down")
            if key in self._waiting:
                raise ValueError(
                    f"{key} was submitted before and is still waiting for other ranks; operations "
                    f"that are under way at the same time need different names"
                )
            if self._gone:
                self._end(submission, _impossible(key, self._gone))
                return
            self._waiting[key] = submission
            self._outbox.append(submission.request)
            if self.timeline is not None:
                self.timeline.begin(key, f"negotiate_{submission.request.kind}")
        self._wake()

    def poll(self, submission: Submission) -> bool:
        """Return whether an operation has ended; moves it along."""
        forks.check(submission.request.key)
        if not submission.done:
            self.progress()
        return submission.done

    def wait(self, submission: Submission) -> None:
        """Wait until an operation has succeeded or failed."""
        forks.check(submission.request.key)
        idle_since = time.monotonic()
        self._drivers += 1
        try:
            while not submission.done and submission.running is None:
                now = time.monotonic()
                if self.progress():
                    idle_since = now
                elif now - idle_since < _YIELD:
                    time.sleep(0)
                else:
                    time.sleep(min((now - idle_since) / 10, _LONGEST_NAP))
        finally:
            self._drivers -= 1
        while not submission.done:
            if submission.running is not None:
                submission.running.wait()  # the thread moves all others along meanwhile
            self.progress()

    def leave(self) -> None:
        """Wait until all ranks have left; what waits for others fails. Collective.

        Afterwards the communicator is used no more, and may be freed.
        """
        submission = Submission(Request("leave", "leave"))
        with self._lock:
            if self._ended:
                return
            self._waiting["leave"] = submission
            self._outbox.append(submission.request)
        self.wait(submission)
        while self._running or self._sends:
            for running in list(self._running):
                running.wait()
            self.progress()
            time.sleep(0)
        with self._lock:  # the thread may be about to look
            self._closed = True

    def say_goodbye(self) -> None:
        """Say that this rank ends: to the coordinator, or as the coordinator to all.

        Waits for messages to be sent, but for no answer.
        """
        until = time.monotonic() + _GOODBYE
        with self._lock:
            if not self._ended and self._size > 1:
                self._outbox.append(Request("leave", "leave"))
                self.progress()
                while self._sends and time.monotonic() < until:
                    self.progress()
                    time.sleep(_LONGEST_NAP)
                self._closed = True

    def progress(self, patient: bool = True) -> bool:
        """Do what can be done now; return whether there was anything.

        See Note [Who drives the agreement]. If not `patient`, do nothing where another thread is
        at it.
        """
        if not self._lock.acquire(blocking=patient):
            return False
        try:
            if self._closed:
                return False
            moved = not self._lost and self._exchange_or_fail()
            for running in list(self._running):
                if running.is_completed():
                    self._running.remove(running)
                    self._finish(running)
                    moved = True
            return moved
        finally:
            self._lock.release()

    def _exchange_or_fail(self) -> bool:
        from mpi4py import MPI

        try:
            return self._exchange()
        except MPI.Exception as error:
            self._lost = True
            self._gone = f"a message of its ranks failed: {error}"
            self._sends, self._outbox = [], []
            for key in list(self._waiting):
                failure = _impossible(key, self._gone)
                failure.__cause__ = error
                self._end(self._waiting.pop(key), failure)
            return True

    def _exchange(self) -> bool:
        """Send what was submitted, and take what has arrived."""
        from mpi4py import MPI

        if self._sends:
            self._sends = [each for each in self._sends if not each.Test()]
        outgoing, self._outbox = self._outbox, []
        moved = bool(outgoing)
        coordinator = self._coordinator
        if coordinator is None:
            if outgoing:
                self._sends.append(self._communicator.isend(outgoing, _COORDINATOR))
            while (message := self._communicator.improbe(_COORDINATOR)) is not None:
                self._apply(message.recv())
                moved = True
            return moved
        if self._size > 1:
            status = MPI.Status()
            while (message := self._communicator.improbe(status=status)) is not None:
                for request in message.recv():
                    coordinator.submit(status.Get_source(), request)
                moved = True
        # After the others', which may have waited here: the last to join is the last here, too.
        for request in outgoing:
            coordinator.submit(self._rank, request)
        decisions = coordinator.decide() if moved else []
        now = time.monotonic()
        if now > self._next_look:
            self._next_look = now + _STALL_LOOKS
            warning, failures = coordinator.stalls()
            if warning:
                logger.warning(warning)
            decisions += failures
        if decisions:
            if self.timeline is not None:
                self.timeline.cycle()
            for rank in range(self._size):
                if rank != self._rank:
                    whats = [decision.for_rank(rank) for decision in decisions]
                    self._sends.append(self._communicator.isend(whats, rank))
            self._apply([decision.for_rank(self._rank) for decision in decisions])
        return moved

    def _apply(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            mine = [self._waiting.pop(key) for key in decision.keys if key in self._waiting]
            if decision.what == RUN:
                self._start(decision, mine)
            elif decision.what == FAIL:
                for submission in mine:
                    self._end(submission, HorovodInternalError(decision.text))
            elif decision.what == JOINED:
                self._joins += 1
                self._counts.clear()
                submission = self._waiting.pop("join")
                submission.last_joined = self._ranks[decision.rank]
                self._end(submission, None)
            elif decision.what == LEFT:
                self._gone = decision.text
                for key in self._waiting.keys() - {"leave"}:
                    self._end(self._waiting.pop(key), _impossible(key, self._gone))
            else:
                assert decision.what == ENDED
                self._ended = True
                leaving = self._waiting.pop("leave", None)
                if leaving is not None:  # none is, where the interpreter just ends
                    self._end(leaving, None)

    def _start(self, decision: Decision, submissions: list[Submission]) -> None:
        for submission in submissions:
            if self.timeline is not None:
                self.timeline.end(submission.request.key)
                self.timeline.begin(submission.request.key, submission.request.kind)
        try:
            running = start(decision, submissions, self.group)
        except (RuntimeError, ValueError, TypeError) as error:
            self._finish(Running(submissions), error)
            return
        for submission in submissions:
            submission.running = running
        self._running.append(running)

    def _finish(self, running: Running, error: Exception | None = None) -> None:
        if error is None:
            try:
                running.finish()
            except RuntimeError as failure:
                error = failure
        if error is not None:
            cause = error
            error = HorovodInternalError(str(cause))
            error.__cause__ = cause
        for submission in running.submissions:
            if self.timeline is not None:
                self.timeline.end(submission.request.key)
            self._end(submission, error)

    def _end(self, submission: Submission, error: Any) -> None:
        submission.error = error
        submission.done = True
        submission.inputs = []


def _impossible(key: str, why: str) -> HorovodInternalError:
    return HorovodInternalError(f"{key} cannot be done: {why}")

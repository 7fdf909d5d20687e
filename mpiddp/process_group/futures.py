"""Threads that complete the futures of operations that nobody waits for.

Note [Who completes futures]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A future's continuation is arbitrary code of the user, and may itself wait for another operation's
future (torch's PowerSGD hook does). So the thread that runs continuations must never be the only
one: a thread that finds a finished operation first makes sure that another thread is watching.
The engine's thread, which moves the operations, runs no Python at all.

The threads are daemons: others would keep the interpreter alive after a failure.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from mpiddp.process_group.ordered_starts import Starter
from mpiddp.process_group.work import LOOK
from mpiddp.system import running_time

if TYPE_CHECKING:
    from mpiddp.engine.requests import Requests
    from mpiddp.process_group.work import Work

# Seconds that an idle thread waits for the next operation.
_IDLE = 1.0


class FutureCompleter:
    """Ends each added operation when its messages have arrived or its time is over.

    Not collective.

    Args:
        requests: those of the process, among them what the operations wait for.

    Attributes:
        starter: begins operations that nobody waits for.
    """

    def __init__(self, requests: Requests) -> None:
        self.starter = Starter(requests)
        self._requests = requests
        self._works: list[Work] = []
        self._wanted = threading.Condition()  # guards all that follows
        self._idle = 0
        self._watched = False
        self._stopped = False

    def add(self, work: Work) -> None:
        """See to it that `work` is ended even if nobody waits for it. Not collective."""
        with self._wanted:
            self._works.append(work)
            if self._watched:
                self._requests.wake()
            else:
                self._call_thread()

    def stop(self) -> None:
        """Let the threads end. Not collective."""
        with self._wanted:
            self._stopped = True
            self._works.clear()
            self._wanted.notify_all()
        self._requests.wake()

    def _call_thread(self) -> None:
        if self._idle:
            self._wanted.notify()
        else:
            threading.Thread(target=self._run, name="mpiddp futures", daemon=True).start()

    def _run(self) -> None:
        while self._take_watch():
            # In a function, so that no variable here keeps a work while this thread waits.
            _end_all(self._next_due())

    def _take_watch(self) -> bool:
        """Wait until there are operations that nobody watches; return False when there are none."""
        with self._wanted:
            self._idle += 1
            try:
                while self._watched or not self._works:
                    in_time = not self._stopped and self._wanted.wait(_IDLE)
                    if not in_time and (self._watched or not self._works):
                        return False
                self._watched = True
                return True
            finally:
                self._idle -= 1

    def _next_due(self) -> list[Work]:
        """Watch until some operations are due; let another thread watch the others."""
        clock = running_time.Clock()
        while True:
            ticket = self._requests.ticket
            running = clock.now()
            with self._wanted:
                due = [work for work in self._works if work.is_due()]
                if due or not self._works:
                    self._works = [work for work in self._works if work not in due]
                    self._watched = False
                    if self._works:
                        self._call_thread()
                    return due
                seconds = min(work.deadline for work in self._works) - running
            self._requests.watch(ticket, min(max(seconds, 0.0), LOOK))


def _end_all(works: list[Work]) -> None:
    for work in works:
        work.end_if_due()

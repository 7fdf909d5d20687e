"""A thread that moves the operations of Horovod along while the ranks compute.

Without it, a rank that submits and then computes would keep all others waiting until it asks for a
result. It sleeps while this rank has nothing under way; where this rank is a coordinator, it then
looks once a second whether others wait, so that a stall is reported although this rank is busy.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from mpiddp.mpi import uncaught

if TYPE_CHECKING:
    from mpiddp.horovod.agreement import Agreement

__all__ = ["ProgressThread"]

# Seconds between looks: while something happens, and when nothing has for a while.
_SHORTEST_NAP = 0.2e-3
_LONGEST_NAP = 1e-3
_IDLE_LOOKS = 1.0


class ProgressThread:
    """Calls `progress` of agreements in the background. Not collective.

    Args:
        wanted: whether there may be a thread at all: MPI must allow calls from several threads.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._agreements: list[Agreement] = []
        self._changed = threading.Condition()
        self._asleep = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def add(self, agreement: Agreement) -> None:
        """Move this agreement along as well."""
        with self._changed:
            self._agreements = [*self._agreements, agreement]
        if agreement.coordinates:
            self.wake()

    def remove(self, agreement: Agreement) -> None:
        """Forget an agreement."""
        with self._changed:
            self._agreements = [each for each in self._agreements if each is not agreement]

    def wake(self) -> None:
        """Say that something was submitted. The first call starts the thread."""
        if not self._wanted or (self._thread is not None and not self._asleep):
            return
        with self._changed:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._run, name="mpiddp.horovod", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        uncaught.take_part()  # an error here ends the job
        nap = _SHORTEST_NAP
        while self._wait(nap):
            agreements = [each for each in self._agreements if not each.driven]
            moved = [each.progress(patient=False) for each in agreements]
            nap = _SHORTEST_NAP if any(moved) else min(nap * 1.5, _LONGEST_NAP)

    def _wait(self, nap: float) -> bool:
        """Sleep for `nap` seconds, or for as long as nothing is under way; whether to go on."""
        with self._changed:
            if not self._stopping:
                if any(each.busy for each in self._agreements):
                    self._changed.wait(nap)
                else:
                    self._sleep()
            return not self._stopping

    def _sleep(self) -> None:
        """Sleep until something is submitted; a coordinator wakes up now and then."""
        self._asleep = True
        # What was submitted before the line above has not woken anybody.
        if not any(each.busy for each in self._agreements):
            looks = any(each.coordinates for each in self._agreements)
            self._changed.wait(_IDLE_LOOKS if looks else None)
        self._asleep = False

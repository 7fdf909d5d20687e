"""The operations of a process group that are under way, and what nobody waits for any more.

Nothing here is collective.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mpiddp.system import running_time

if TYPE_CHECKING:
    from mpiddp.engine.requests import Pending
    from mpiddp.process_group.work import Work

__all__ = ["LAST", "UnderWay", "noted"]

Method = TypeVar("Method", bound=Callable[..., Any])

# Seconds that what is under way has to end, once another rank has said that the group is broken.
LAST = 1.0

# Memory that MPI may still write to after a time limit was reached, or after Ctrl-C.
_abandoned: list[object] = []

# Seconds between two looks whether calls of other threads have ended.
_NAP = 1e-3


def noted(method: Method) -> Method:
    """Note the calls of a runner's method while they last: what they use is not freed."""

    @functools.wraps(method)
    def call(runner: Any, *arguments: Any, **named: Any) -> Any:
        calls = runner.under_way.calls
        calls.append(None)
        try:
            return method(runner, *arguments, **named)
        finally:
            calls.pop()

    return cast("Method", call)


class UnderWay:
    """Those of one group.

    Attributes:
        works: that the caller may have forgotten while MPI uses their memory.
        calls: one entry for each call that has not returned.
        has_abandoned: whether MPI may use some memory, and the group's communicators, until the
            process ends.
    """

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.calls: list[None] = []
        self.has_abandoned = False
        self._sweep_at = 16
        # What nobody waits for.
        self._left: list[Pending] = []

    def add(self, work: Work) -> None:
        """Keep an operation until it is over."""
        self.works.append(work)

    def sweep_if_due(self) -> None:
        """Forget what is over, once it may be much."""
        if len(self.works) > self._sweep_at:
            self.sweep()

    def sweep(self) -> None:
        """Forget the works that are over."""
        self.works = [work for work in self.works if not work.end_if_due()]
        self._sweep_at = 16 + 2 * len(self.works)

    def leave(self, pending: Pending) -> None:
        """Let the engine move something along that nobody waits for."""
        pending.submit()
        pending.hand_over()
        self._left = [each for each in self._left if not each.done] + [pending]

    def hurry(self) -> None:
        """Let all end soon. In any thread."""
        for work in list(self.works):
            work.deadline = min(work.deadline, running_time.now() + LAST)

    def end(self) -> None:
        """Wait a little for what other ranks have called as well; abandon the rest."""
        until = running_time.now() + LAST
        for work in self.works:
            if not work.wait_for_end(max(until - running_time.now(), 0.0)):
                self.abandon(work)
        self.works.clear()
        for pending in self._left:
            if not pending.wait(LAST):
                self.abandon(pending)
        self._left.clear()

    def end_calls(self) -> None:
        """Wait a little for the calls of other threads, and for what they have begun."""
        until = time.monotonic() + 2 * LAST  # they may take two looks to see why they end
        while self.calls and time.monotonic() < until:
            time.sleep(_NAP)
        self.end()  # what they have begun
        self.has_abandoned = self.has_abandoned or bool(self.calls)

    def abandon(self, *memory: object) -> None:
        """Keep memory that MPI may still use though nobody waits any more."""
        self.has_abandoned = True
        _abandoned.append(memory)

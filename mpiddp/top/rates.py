"""How fast a rank is now: from what its page counted at this look and at those before."""

from __future__ import annotations

from collections import deque

from mpiddp.top.finding import Rank
from mpiddp.top.pages import Module, Pace

__all__ = ["Counter", "History", "main_module"]

# Seconds of which a rate is the mean, where there are so many looks.
_WINDOW = 10.0
# A rate is 0 if the next count is late by so many usual intervals, and so many seconds.
_LATE, _LEAST_LATE = 3.0, 2.0
# Linux counts processor time in hundredths of a second.
_LEAST_USED = 0.5


class Counter:
    """A number that grows, and seconds that grow with it."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, float, float]] = deque()

    def add(self, pace: Pace, seconds: float = 0.0, before_seconds: float = 0.0) -> None:
        """Take what a look has found. Not collective.

        Args:
            pace: how many there were, and when.
            seconds: that have grown with them.
            before_seconds: the same at `pace.before`.
        """
        points = self._points
        if points and pace.count < points[-1][0]:  # it counts anew
            points.clear()
        if pace.count == 0 or (points and pace.count == points[-1][0]):
            return
        if not points and pace.before_count < pace.count:
            points.append((pace.before_count, pace.before, before_seconds))
        points.append((pace.count, pace.last, seconds))
        while len(points) > 2 and points[1][1] < pace.last - _WINDOW:
            points.popleft()

    def per_second(self, now: float) -> float | None:
        """Return how many come in a second, 0 if they come no more; None if nobody knows yet.

        Not collective.

        Args:
            now: seconds on the monotonic clock.
        """
        count, between = self._grown()
        if not count or between <= 0:
            return None
        late = now - self._points[-1][1]
        if late > max(_LATE * between / count, _LEAST_LATE):
            return 0.0
        return count / between

    def share(self) -> float | None:
        """Return which share of the time the seconds are; None if nobody knows yet.

        Not collective.
        """
        count, between = self._grown()
        if not count or between <= 0:
            return None
        return min(max((self._points[-1][2] - self._points[0][2]) / between, 0.0), 1.0)

    def _grown(self) -> tuple[int, float]:
        if not self._points:
            return 0, 0.0
        first, last = self._points[0], self._points[-1]
        return last[0] - first[0], last[1] - first[1]


class History:
    """What the looks before have found of one rank."""

    def __init__(self) -> None:
        self.steps = Counter()
        self.operations = Counter()
        self._module: int | None = None
        self._used: tuple[float, float] | None = None  # seconds of age, and of processor time
        self.processor = 0.0

    def add(self, rank: Rank) -> None:
        """Take what a look has found. Not collective."""
        self._add_usage(rank)
        if rank.page is None:
            return
        self.operations.add(rank.page.operations)
        module = main_module(rank)
        if module is None:
            return
        if module.source != self._module:
            self.steps, self._module = Counter(), module.source
        self.steps.add(module.steps, module.exposed, module.before_exposed)

    def _add_usage(self, rank: Rank) -> None:
        """Find out which share of a core the rank uses: since the look before, or its start."""
        age, processor = rank.usage.age, rank.usage.processor
        before = self._used or (0.0, 0.0)
        if age - before[0] >= _LEAST_USED:
            self.processor = max(processor - before[1], 0.0) / (age - before[0])
            self._used = age, processor


def main_module(rank: Rank) -> Module | None:
    """Return the module whose steps are those of the training; None if there is none.

    Not collective. A GAN has two that step in turn, and a program may have one left from before:
    it is one of those that have stepped lately, with most steps.
    """
    modules = [] if rank.page is None else rank.page.modules
    if not modules:
        return None
    latest = max(module.steps.last for module in modules)
    lately = [each for each in modules if latest - each.steps.last <= max(_WINDOW, 2 * each.step)]
    return max(lately, key=lambda module: module.steps.count)

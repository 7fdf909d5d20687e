"""Steps that stand out: much longer than most, and by what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpiddp.report import parts

if TYPE_CHECKING:
    from mpiddp.report.steps import Steps
    from mpiddp.report.trace_files import RankTrace

__all__ = ["OddStep", "find"]

# Longer than the median by so many times the usual deviation, and by so much of the median.
_DEVIATIONS, _LONGER = 5, 0.2
# A median deviation of normal values, as a part of the standard one.
_NORMAL = 0.6745
_MOST = 5


@dataclass(frozen=True)
class OddStep:
    """A step that took much longer.

    Attributes:
        number: of the step.
        duration: in microseconds, on the rank where it took longest.
        times: how many times the median it took.
        rank: that did something for longer than it mostly does.
        part: what that was, other than waiting for another rank, where somebody did anything else.
        more: for how much longer, in microseconds.
    """

    number: int
    duration: float
    times: float
    rank: int
    part: int
    more: float


def find(ranks: list[RankTrace], steps: Steps) -> list[OddStep]:
    """Return the steps that stand out most, in order of time. Not collective."""
    durations = steps.durations.max(axis=0)
    median = float(np.median(durations))
    deviation = float(np.median(np.abs(durations - median))) / _NORMAL
    limit = median + max(_DEVIATIONS * deviation, _LONGER * median)
    odd = np.flatnonzero(durations > limit)
    odd = np.sort(odd[np.argsort(-durations[odd])][:_MOST])
    if not len(odd):
        return []
    usual = np.median(steps.times, axis=1)
    found = []
    for place in odd:
        more = steps.times[:, place] - usual
        # That others have waited for it is no cause.
        own = more.copy()
        own[:, parts.WAITING] = -np.inf
        chosen = own if own.max() > more.max() / 2 else more
        rank, part = np.unravel_index(int(np.argmax(chosen)), chosen.shape)
        found.append(
            OddStep(
                int(steps.numbers[place]),
                float(durations[place]),
                float(durations[place]) / median,
                ranks[int(rank)].rank,
                int(part),
                float(chosen[rank, part]),
            )
        )
    return found

"""Give each moment of each step of each rank to a part of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpiddp.report import parts
from mpiddp.report.reductions import Reductions, measure

if TYPE_CHECKING:
    from mpiddp.report.trace_files import RankTrace, Trace

__all__ = ["Steps", "Stretches", "take_apart"]


@dataclass(frozen=True)
class Stretches:
    """What one rank did, one after the other without a gap.

    Attributes:
        began: when each stretch began, in microseconds; it ends where the next one begins.
        ended: when the last one ended.
        part: which part of a step it is.
    """

    began: NDArray[np.float64]
    ended: float
    part: NDArray[np.int8]

    def between(self, began: float, ended: float) -> list[tuple[int, float, float]]:
        """Return the part, beginning and end of what lies in a time. Not collective."""
        ends = np.append(self.began[1:], self.ended)
        inside = (ends > began) & (self.began < ended)
        return [
            (int(part), max(float(a), began), min(float(b), ended))
            for part, a, b in zip(self.part[inside], self.began[inside], ends[inside], strict=True)
        ]


@dataclass(frozen=True)
class Steps:
    """The steps that all ranks have, taken apart.

    Attributes:
        numbers: of the steps, as `ProfilerStep#N` in the trace.
        windows: when each began and ended, of shape (ranks, steps, 2), in microseconds.
        times: of each part of `parts`, of shape (ranks, steps, parts), in microseconds.
        stretches: by rank.
        reductions: what is known of the reductions.
        left_out: how many steps only some ranks have.
    """

    numbers: NDArray[np.int64]
    windows: NDArray[np.float64]
    times: NDArray[np.float32]
    stretches: list[Stretches]
    reductions: Reductions
    left_out: int

    @property
    def durations(self) -> NDArray[np.float64]:
        """How long each step was, of shape (ranks, steps), in microseconds."""
        return self.windows[:, :, 1] - self.windows[:, :, 0]


def take_apart(trace: Trace) -> Steps:
    """Return the steps of a trace. Not collective.

    Raises:
        ValueError: no step is on all ranks from its beginning to its end.
    """
    numbers, anywhere = trace.ranks[0].numbers, trace.ranks[0].numbers
    for rank in trace.ranks[1:]:
        numbers = np.intersect1d(numbers, rank.numbers)
        anywhere = np.union1d(anywhere, rank.numbers)
    if not len(numbers):
        raise ValueError(
            "no step of the trace is whole on all ranks: a step is seen from the end of the one "
            "before, so a trace needs two backward passes of one module at least"
        )
    reductions = measure(trace, numbers)
    windows = np.stack([rank.windows[np.isin(rank.numbers, numbers)] for rank in trace.ranks])
    times = np.zeros((len(trace.ranks), len(numbers), len(parts.NAMES)), np.float32)
    stretches = []
    for place, rank in enumerate(trace.ranks):
        mine = _stretches(rank, windows[place], reductions.waits[place])
        stretches.append(mine)
        lengths = np.diff(np.append(mine.began, mine.ended))
        step = np.searchsorted(windows[place, :, 1], mine.began, side="right")
        inside = step < len(numbers)
        inside[inside] = windows[place, step[inside], 0] <= mine.began[inside]
        np.add.at(times[place], (step[inside], mine.part[inside]), lengths[inside])
    left_out = len(anywhere) - len(numbers)
    return Steps(numbers, windows, times, stretches, reductions, left_out)


def _stretches(rank: RankTrace, windows: NDArray[np.float64], waits: list[Any]) -> Stretches:
    """Return what a rank did; where two spans overlap, the part with the higher number counts."""
    spans = [(int(part), float(began), float(ended)) for part, began, ended in rank.spans]
    spans += _losses(rank)
    for _, began, alone, ended in waits:
        spans += [(parts.WAITING, began, alone), (parts.EXPOSED, alone, ended)]
    edges = np.unique(
        np.concatenate([windows.ravel(), *(np.array(span[1:])[None] for span in spans)], axis=None)
    )
    part = np.zeros(len(edges), np.int8)
    for which, began, ended in sorted(spans):
        first, last = np.searchsorted(edges, (began, ended))
        part[first:last] = which
    # One stretch for neighbours of one part, but none over two steps. The last edge is an end.
    keeps = np.ones(len(edges), bool)
    keeps[1:] = (part[1:] != part[:-1]) | np.isin(edges[1:], windows)
    keeps[-1] = False
    return Stretches(edges[keeps], float(edges[-1]), part[keeps])


def _losses(rank: RankTrace) -> list[tuple[int, float, float]]:
    """Return what lies between each forward and the backward after it."""
    forwards = np.sort(rank.spans[rank.spans["part"] == parts.FORWARD], order="began")
    backwards = np.sort(rank.spans["began"][rank.spans["part"] == parts.BACKWARD])
    after = np.searchsorted(backwards, forwards["ended"])
    following = np.append(forwards["began"][1:], np.inf)
    return [
        (parts.LOSS, float(forward["ended"]), float(backwards[place]))
        for forward, place, limit in zip(forwards, after, following, strict=True)
        if place < len(backwards) and backwards[place] <= limit
    ]

"""Which of several bucket sizes makes steps shortest, found out from the times of steps.

Note [What is clear]
~~~~~~~~~~~~~~~~~~~~
Machines are noisy, and what was fast first may have had the network for itself. So sizes take
turns. First all of them have two turns, forth and back, and each is compared with the default in
the same round. The best one then stands against the default in five pairs of turns. It is chosen if
it was faster in all five, and by 2 % in the median; else the default stays. Without a difference
that happens by chance once in 32 times, and one that is 3 % slower must be lucky five times.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator
from dataclasses import dataclass

__all__ = ["STEPS_OF_A_TURN", "Found", "most_steps", "search"]

# The first step of a turn is not counted: it lays the buckets out, and is the first to touch them.
STEPS_OF_A_TURN = 4
_ROUNDS = 2
_PAIRS = 5
# Less is not worth another size than the documented one.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        best: number of the size.
        gain: by which part its steps are shorter than those of the default, 0 for the default.
        seconds: of a step with each size that was tried, the median of its turns.
    """

    best: int
    gain: float
    seconds: dict[int, float]


def most_steps(sizes: int) -> int:
    """Return how many steps a search takes at most. Not collective."""
    return ((sizes * _ROUNDS if sizes > 2 else 0) + 2 * _PAIRS) * STEPS_OF_A_TURN


def search(sizes: int, default: int) -> Generator[int, float, Found]:
    """Yield the number of the size to try next; takes the seconds of a step with it.

    Not collective: from the same numbers all ranks get the same.

    Args:
        sizes: how many there are, at least 2.
        default: number of the one that stays unless another is clearly better.

    Returns:
        What was found.
    """
    turns: dict[int, list[float]] = {}

    def found(best: int, gain: float) -> Found:
        return Found(best, gain, {each: statistics.median(turns[each]) for each in sorted(turns)})

    numbers = list(range(sizes))
    if sizes == 2:
        best = 1 - default
    else:
        for number in range(_ROUNDS):
            for each in reversed(numbers) if number % 2 else numbers:
                turns.setdefault(each, []).append((yield each))
        gains = [
            statistics.fmean(
                1 - own / its for own, its in zip(turns[each], turns[default], strict=True)
            )
            for each in numbers
        ]
        best = max(numbers, key=gains.__getitem__)
        if gains[best] < _LEAST_GAIN:
            return found(default, 0.0)
    pairs = []
    for number in range(_PAIRS):
        times = {}
        for each in (best, default) if number % 2 else (default, best):
            times[each] = yield each
            turns.setdefault(each, []).append(times[each])
        pairs.append(1 - times[best] / times[default])
        if pairs[-1] <= 0:
            return found(default, 0.0)
    gain = statistics.median(pairs)
    return found(best, gain) if gain >= _LEAST_GAIN else found(default, 0.0)

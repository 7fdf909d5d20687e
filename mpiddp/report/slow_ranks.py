"""Which rank or node the others wait for, since when, and what it does longer than they.

Note [A rank that all wait for]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The slowest rank of a step is the one that is the last to launch its last bucket. It counts where
the others have waited for more than a twentieth of a step, in the mean. Its run is that with the
highest number of steps in which it was the slowest, less those in which it was not: one step in
which another rank was later does not end a run, and many do. A rank is named where that number is
so high that it would come about by chance in one trace of 20, if each rank were the slowest as
often as others; half of it where the others wait for a quarter of a step; 3 at least. Steps that
cost less than half of what most of the run do, do not count: else chance would begin a run early.
Where no rank is named, the same is done for nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mpiddp.report import parts

if TYPE_CHECKING:
    from mpiddp.report.steps import Steps
    from mpiddp.report.trace_files import RankTrace

__all__ = ["Slow", "find"]

# Of a step.
_COUNTS = 0.05
_HIGH = 0.25
# Steps; and how seldom it may be chance.
_FEWEST = 3
_TRACES = 20
# More than that many are not named: then it is nobody in particular.
_MOST = 3


@dataclass(frozen=True)
class Slow:
    """A rank, or a node, that the others wait for.

    Attributes:
        node: the number of the node, where it is all of it; else of the rank's node.
        rank: None where it is a node.
        host: its name.
        first, last: the numbers of the first and the last step of its run.
        steps: how many steps the run has.
        slowest: in how many of them it was the slowest.
        to_the_end: whether the run lasts until the trace ends.
        cost: how long the others have waited in those, in the mean, in microseconds.
        duration: of these steps, in the mean, in microseconds.
        longer: the part that it takes longer for than the others, and by how much; of the parts
            that are its own work.
    """

    node: int
    rank: int | None
    host: str
    first: int
    last: int
    steps: int
    slowest: int
    to_the_end: bool
    cost: float
    duration: float
    longer: tuple[int, float]

    @property
    def name(self) -> str:
        """Who it is, in words."""
        if self.rank is None:
            return f"node {self.node} ({self.host})"
        return f"rank {self.rank} on {self.host}"


def find(ranks: list[RankTrace], steps: Steps) -> list[Slow]:
    """Return the ranks that the others wait for, else the nodes. Not collective."""
    if len(ranks) < 2:
        return []
    waiting = steps.times[:, :, parts.WAITING]
    late = steps.reductions.late
    slowest = np.argmax(late, axis=0)
    # The slowest rank does not wait.
    cost = waiting.sum(axis=0) / (len(ranks) - 1)
    matters = cost > _COUNTS * np.median(steps.durations, axis=0)
    nodes = np.array([int(rank.facts["node"]) for rank in ranks])

    def of_rank(place: int) -> NDArray[np.bool_]:
        return np.equal(np.arange(len(ranks)), place)

    def of_node(node: int) -> NDArray[np.bool_]:
        mine: NDArray[np.bool_] = nodes == node
        return mine

    found = _named(ranks, steps, slowest, matters, cost, of_rank, is_node=False)
    if not found and len(np.unique(nodes)) > 1:
        found = _named(ranks, steps, nodes[slowest], matters, cost, of_node, is_node=True)
    return found


def _named(
    ranks: list[RankTrace],
    steps: Steps,
    slowest: NDArray[np.int64],
    matters: NDArray[np.bool_],
    cost: NDArray[np.float64],
    members: Callable[[int], NDArray[np.bool_]],
    is_node: bool,
) -> list[Slow]:
    found = []
    others = len(np.unique([rank.facts["node"] for rank in ranks])) if is_node else len(ranks)
    chance = math.ceil(math.log(_TRACES * len(slowest)) / math.log(others))
    usual = float(np.median(steps.durations))
    for who in np.unique(slowest[matters]):
        mine = (slowest == who) & matters
        first, last = _run(mine)
        # What costs much less than most of the run was chance, before or after it.
        costs = cost[first : last + 1][mine[first : last + 1]]
        mine &= cost > np.median(costs) / 2
        first, last = _run(mine)
        count = int(mine[first : last + 1].sum())
        run = np.flatnonzero(mine[first : last + 1]) + first
        needed = chance
        if count and cost[run].mean() > _HIGH * usual:
            needed = math.ceil(chance / 2)
        if 2 * count - (last - first + 1) < max(needed, _FEWEST):
            continue
        here = members(int(who))
        facts = ranks[int(np.argmax(here))].facts
        found.append(
            Slow(
                int(facts["node"]),
                None if is_node else int(facts["rank"]),
                str(facts["host"]),
                int(steps.numbers[first]),
                int(steps.numbers[last]),
                last - first + 1,
                count,
                # The last step of all may be an odd one.
                last >= len(steps.numbers) - 2,
                float(cost[run].mean()),
                float(steps.durations[:, run].mean()),
                _longer(steps, here, run),
            )
        )
    return sorted(found, key=lambda slow: -slow.cost * slow.slowest)[:_MOST]


def _run(mine: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the first and last place of the run with most steps that are, less those that are not.

    Not collective.
    """
    best, best_sum, began, total = (0, -1), 0, 0, 0
    for place, is_mine in enumerate(mine):
        if total <= 0:
            began, total = place, 0
        total += 1 if is_mine else -1
        if total > best_sum:
            best, best_sum = (began, place), total
    return best


def _longer(steps: Steps, here: NDArray[np.bool_], run: NDArray[np.int64]) -> tuple[int, float]:
    own = [part for part in parts.NAMES if part not in (parts.WAITING, parts.EXPOSED)]
    times = steps.times[:, run][:, :, own].mean(axis=1)
    more = times[here].mean(axis=0) - np.median(times[~here], axis=0)
    place = int(np.argmax(more))
    return own[place], float(more[place])

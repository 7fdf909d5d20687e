"""How each bucket travelled in all steps, and why it was not hidden behind backward.

Note [Why a bucket is exposed]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Of each reduction three ends are compared, each no earlier than the one before:

- alone: each bucket travels as if there were no others, from when all have launched it, as fast as
  buckets do when backward is over. What is exposed even so is because it was filled late.
- queued: one after the other, at that speed. What that adds is because the wire is full.
- as it was. What that adds is because the engine was late: buckets that were ready have waited for
  their first chunk to be sent, or travelled more slowly while backward ran. Where buckets travelled
  no more slowly then, only their wait for the first chunk counts as that, and the rest is the wire.

A bucket's part of each is by how much it moves that end. So the parts add up to what is exposed;
one of them may be below 0, where a bucket makes up for what others have lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpiddp.report.reductions import Travels

__all__ = ["CAUSES", "BucketTimes", "sum_up"]

FILLED_LATE, WIRE_FULL, ENGINE_LATE = range(3)
CAUSES = {FILLED_LATE: "filled late", WIRE_FULL: "wire full", ENGINE_LATE: "engine late"}


def _three() -> NDArray[np.float64]:
    return np.zeros(3)


@dataclass
class BucketTimes:
    """How one bucket of a module travelled, in microseconds, summed over ranks and steps.

    Attributes:
        count: how often.
        travelled: while it was its turn.
        exposed: what of that was not hidden, by cause.
        behind, behind_bytes: the time, and the bytes, where it travelled before backward was over.
        after, after_bytes: where it did so when backward was over on all ranks.
    """

    count: int = 0
    travelled: float = 0.0
    exposed: NDArray[np.float64] = field(default_factory=_three)
    behind: float = 0.0
    behind_bytes: float = 0.0
    after: float = 0.0
    after_bytes: float = 0.0


def sum_up(travels: Iterable[Travels]) -> dict[tuple[int, int], BucketTimes]:
    """Return the times of each bucket, by module and number. Not collective."""
    found: dict[tuple[int, int], BucketTimes] = {}
    travels = list(travels)
    for one in travels:
        time, is_after = one.reduced - one.turn, one.turn >= 0
        for number in np.unique(one.buckets):
            mine = (one.buckets == number) & np.isfinite(time)
            times = found.setdefault((one.module, int(number)), BucketTimes())
            times.count += int(mine.sum())
            times.travelled += float(time[mine].sum())
            behind, after = mine & (one.reduced <= 0), mine & is_after
            times.behind += float(time[behind].sum())
            times.behind_bytes += float(one.bytes[behind].sum())
            times.after += float(time[after].sum())
            times.after_bytes += float(one.bytes[after].sum())
    for one in travels:
        _add_causes(one, found)
    return found


def _add_causes(one: Travels, found: dict[tuple[int, int], BucketTimes]) -> None:
    after = sum(t.after for (module, _), t in found.items() if module == one.module)
    size = sum(t.after_bytes for (module, _), t in found.items() if module == one.module)
    behind = sum(t.behind for (module, _), t in found.items() if module == one.module)
    behind_size = sum(t.behind_bytes for (module, _), t in found.items() if module == one.module)
    is_slower = behind * size > after * behind_size
    time = one.reduced - one.turn
    # In the mean: of several that are under way at once, one takes from another.
    fast = one.bytes * (after / size) if size else time - one.late
    fast, done = np.nan_to_num(fast), np.zeros((3, len(time)))
    queued = np.full(len(time), -np.inf)
    for place in range(time.shape[1]):
        there = np.isfinite(time[:, place])
        launched, took = one.launched[:, place], fast[:, place]
        queued = np.where(there, np.fmax(queued, launched) + took, queued)
        alone = np.fmax(done[0], launched + took)
        ends = np.stack([alone, np.fmax(alone, queued), np.fmax(done[2], one.reduced[:, place])])
        moved = np.where(there, ends - done, 0)
        done = np.where(there, ends, done)
        # By how much each end is moved beyond the one before.
        causes = np.diff(moved, axis=0, prepend=0)
        if size and behind_size and not is_slower:
            kept = np.clip(causes[ENGINE_LATE], 0, np.nan_to_num(one.late[:, place]))
            causes[WIRE_FULL] += causes[ENGINE_LATE] - kept
            causes[ENGINE_LATE] = kept
        for number in np.unique(one.buckets[there, place]):
            mine = there & (one.buckets[:, place] == number)
            found[one.module, int(number)].exposed += causes[:, mine].sum(axis=1)

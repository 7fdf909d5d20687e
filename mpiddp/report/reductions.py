"""What of each reduction was hidden behind backward, exposed, or a wait for the slowest rank.

Note [Waiting and exposed]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A bucket cannot be reduced before the last rank of its group has launched it. So of the time that a
rank waits at the end of its backward,

- what lies before the last rank has launched its last bucket is waiting for the slowest rank,
- the rest is exposed communication: all have all gradients, and only their way takes time.

A rank's own launches are no wait for others, so for the rank that is last the first part is 0. So
it is where the two moments differ by no more than the two ranks' clocks may be wrong.

A bucket travels from the moment when all have launched it, or, since buckets travel one after the
other, when the one before it is reduced, until it is reduced. What of that lies before the rest of
the wait begins is hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpiddp.report.trace_files import Trace

__all__ = ["Reductions", "Travels", "measure"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Travels:
    """How the buckets of one reduction travelled. Each array is of shape (ranks, buckets).

    The buckets of a rank are in the order in which they were reduced there. Times are microseconds
    after the moment when only communication was left, so what is above 0 is exposed.

    Attributes:
        module: the number of the module.
        buckets: their numbers.
        bytes: their sizes.
        launched: when the last rank had launched them.
        turn: when they began to travel.
        reduced: when they were reduced.
        late: how long it was their turn and no chunk was sent; 0 where it is not known.
    """

    module: int
    buckets: NDArray[np.int32]
    bytes: NDArray[np.float32]
    launched: NDArray[np.float32]
    turn: NDArray[np.float32]
    reduced: NDArray[np.float32]
    late: NDArray[np.float32]


@dataclass
class Reductions:
    """What all reductions were.

    Attributes:
        waits: of each rank, of each wait at the end of a backward that lies in a step: the place of
            the step, when the wait began, when the last rank had launched, and when it ended.
        hidden: how long communication was hidden, by rank and step.
        exposed: how long it was not.
        late: how much later than the first rank of its group a rank had launched its last bucket,
            by rank and step.
        travels: of each reduction of a group.
        sends_chunks: whether the transport sends chunks.
    """

    waits: list[list[tuple[int, float, float, float]]]
    hidden: Floats
    exposed: Floats
    late: Floats
    travels: list[Travels]
    sends_chunks: bool


def measure(trace: Trace, numbers: NDArray[np.int64]) -> Reductions:
    """Return what the reductions were in the steps of these numbers. Not collective.

    Args:
        trace: of all ranks.
        numbers: of steps that each rank has.
    """
    shape = len(trace.ranks), len(numbers)
    found = Reductions(
        [[] for _ in trace.ranks], np.zeros(shape), np.zeros(shape), np.zeros(shape), [], False
    )
    errors = np.array([rank.error for rank in trace.ranks])
    # By module and backward pass: when the wait of a rank began and ended, and its step.
    ends: dict[tuple[int, int], dict[int, tuple[float, float, int]]] = {}
    for place, rank in enumerate(trace.ranks):
        windows = rank.windows[np.isin(rank.numbers, numbers)]
        steps = np.searchsorted(windows[:, 1], rank.waits["ended"] - 0.01)
        for wait, step in zip(rank.waits, steps, strict=True):
            if step < len(numbers) and windows[step, 0] <= wait["ended"]:
                key = int(wait["module"]), int(wait["number"])
                times = float(wait["began"]), float(wait["ended"]), int(step)
                ends.setdefault(key, {})[place] = times
    for key, rows, places in _by_reduction(trace):
        if waits := ends.pop(key, None):
            _take(found, rows, places, waits, errors)
    # Of a wait without buckets nothing is known but that it was one.
    for left in ends.values():
        for place, (began, ended, step) in left.items():
            found.waits[place].append((step, began, began, ended))
    return found


def _by_reduction(trace: Trace) -> list[tuple[tuple[int, int], NDArray[Any], NDArray[np.int64]]]:
    """Return the module and backward pass of each reduction of a group, its buckets, and whose."""
    rows = np.concatenate([rank.buckets for rank in trace.ranks])
    places = np.repeat(np.arange(len(trace.ranks)), [len(rank.buckets) for rank in trace.ranks])
    if not len(rows):
        return []
    keys = np.stack([rows["module"], rows["number"], rows["group"]])
    order = np.lexsort((rows["bucket"], places, *keys[::-1]))
    keys = keys[:, order]
    cuts = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
    return [
        ((int(rows["module"][part[0]]), int(rows["number"][part[0]])), rows[part], places[part])
        for part in np.split(order, cuts)
    ]


def _take(
    found: Reductions,
    rows: NDArray[Any],
    places: NDArray[np.int64],
    waits: dict[int, tuple[float, float, int]],
    errors: Floats,
) -> None:
    """Add one reduction of one group."""
    here = np.isin(places, list(waits))
    rows, places = rows[here], places[here]
    if not len(rows):
        return
    ranks, line = np.unique(places, return_inverse=True)
    columns, column = np.unique(rows["bucket"], return_inverse=True)

    def table(name: str) -> Floats:
        made = np.full((len(ranks), len(columns)), np.nan)
        made[line, column] = rows[name]
        return made

    launched, reduced, sent = table("launched"), table("reduced"), table("sent")
    began, ended, steps = (np.array(each) for each in zip(*(waits[r] for r in ranks), strict=True))
    own = np.nanmax(launched, axis=1)
    ready = np.maximum(began, own)
    slowest = int(np.argmax(own))
    # When only the way of the gradients takes time.
    alone = np.where(own[slowest] - ready > errors[ranks] + errors[ranks[slowest]], own[slowest], 0)
    alone = np.minimum(np.maximum(began, alone), ended)
    found.late[ranks, steps] += own - own.min()
    found.exposed[ranks, steps] += ended - alone
    for index, rank in enumerate(ranks):
        found.waits[rank].append((int(steps[index]), began[index], alone[index], ended[index]))

    # One after the other, in the order in which each rank has had them.
    order = np.argsort(reduced, axis=1)
    common = np.broadcast_to(np.nanmax(launched, axis=0), launched.shape)
    numbers, sizes = np.broadcast_to(columns, launched.shape), table("bytes")
    common, reduced, sent, numbers, sizes = (
        np.take_along_axis(values, order, axis=1)
        for values in (common, reduced, sent, numbers, sizes)
    )
    before = np.concatenate([np.full((len(ranks), 1), -np.inf), reduced[:, :-1]], axis=1)
    turn = np.minimum(np.maximum(common, before), reduced)
    found.sends_chunks |= bool(np.isfinite(sent).any())
    hidden = np.minimum(reduced, np.maximum(turn, alone[:, None])) - turn
    found.hidden[ranks, steps] += np.nansum(hidden, axis=1)
    late = np.nan_to_num(np.clip(sent - turn, 0, reduced - turn))
    launched_by_all, turn, reduced = (
        (values - alone[:, None]).astype("f4") for values in (common, turn, reduced)
    )
    found.travels.append(
        Travels(
            int(rows["module"][0]),
            numbers.astype("i4"),
            sizes.astype("f4"),
            launched_by_all,
            turn,
            reduced,
            late.astype("f4"),
        )
    )

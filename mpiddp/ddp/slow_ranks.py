"""Which rank the others wait for: compared every 25 steps, and told where it costs much.

Note [The rank that all wait for]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All ranks end a reduction together, and each waits for it from the end of its own backward on. The
rank that comes last waits least: its wait is that of communication alone. What the others wait
longer is its doing. So the waits of one step say who was the last and what that cost, and no clock
of another rank is needed. The ranks tell each other their waits of 25 steps beside the gradients of
the next one: that begins before the first bucket is launched, on the communicator of the module's
own gradients, so all ranks have begun it when the gradients are reduced, and it ends there. Nothing
of it is under way when a program ends: MPICH's MPI_Finalize takes up to half a minute then. Where a
GPU computes, the end of backward is that of its launch, and the waits say nothing.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import weakref
import zlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from mpiddp import settings
from mpiddp.reducer.step_times import COMPARED

if TYPE_CHECKING:
    from mpiddp.engine.requests import Pending
    from mpiddp.reducer.state import ReducerState

__all__ = ["SlowRank", "StepComparison", "Window", "comparison_of", "slowest_of"]

# Windows that are looked at: the last 100 steps.
_WINDOWS = 4
# Seconds that a comparison may take that all ranks have begun.
_PATIENCE = 10.0
# A rank is late in a step if the others wait for it longer than this share of the step.
_LATE = 0.02
# It is told if it is late in so many of the steps, and so much of all of them is lost.
_MOST, _LOST = 0.6, 0.05
# The parts of a step, as in `StepTimes.totals` after the whole. One is told where it takes longer
# than elsewhere by so much of what is lost.
_PARTS = ("between the reduction and the forward", "in the forward", "in the backward")
_CAUSE = 0.3


class Window:
    """What all ranks have said of the same steps. Not collective.

    Args:
        rows: of each rank: a number for its host, the seconds of all steps together and of their
            parts, in the order of `StepTimes.totals`, and its exposed seconds in each step, NaN
            where it had no inputs.

    Attributes:
        hosts: the first of these.
        parts: the next six, of the mean step.
        step: seconds of the longest mean step.
        last: for each step, which rank was late; -1: none.
        lead: and for how many seconds the others have waited for it.
        waited: for each rank, how long it has waited for the last one, in the mean.
    """

    def __init__(self, rows: numpy.ndarray) -> None:
        self.hosts = rows[:, 0].astype(int)
        self.parts = rows[:, 1:7] / COMPARED
        self.step = float(self.parts[:, 0].max())
        waits = numpy.where(numpy.isnan(rows[:, 7:]), numpy.inf, rows[:, 7:])
        columns = numpy.arange(waits.shape[1])
        last, least = waits.argmin(axis=0), waits.min(axis=0)
        others = waits.copy()
        others[last, columns] = numpy.inf
        others.sort(axis=0)
        there = numpy.isfinite(others).sum(axis=0)
        middle = others[numpy.maximum(there - 1, 0) // 2, columns]
        # A rank whose inputs nobody else has waits for nobody.
        lead = numpy.where(there > 0, middle, 0.0) - numpy.where(there > 0, least, 0.0)
        late = lead > _LATE * self.step
        self.last, self.lead = numpy.where(late, last, -1), numpy.where(late, lead, 0.0)
        finite = numpy.isfinite(waits)
        longer = numpy.where(finite, waits, 0.0) - numpy.where(finite, least, 0.0)
        self.waited = longer.sum(axis=1) / numpy.maximum(finite.sum(axis=1), 1)


@dataclass(frozen=True)
class SlowRank:
    """The rank, or the ranks of a host, that the others have waited for.

    Attributes:
        ranks: it, or all ranks of the host.
        steps: in how many of the steps.
        of: how many steps there were.
        lost: seconds of each of these steps.
        step: seconds that a step takes.
    """

    ranks: list[int]
    steps: int
    of: int
    lost: float
    step: float

    def is_worth_telling(self) -> bool:
        """Return whether it is late in most steps, and costs much."""
        return self.steps >= _MOST * self.of and self.lost * self.steps / self.of > (
            _LOST * self.step
        )


def slowest_of(windows: list[Window]) -> SlowRank | None:
    """Return the rank that was late most often; or a host, where its ranks are in turn.

    Not collective. None: nobody was late.
    """
    last = numpy.concatenate([window.last for window in windows])
    lead = numpy.concatenate([window.lead for window in windows])
    if not (last >= 0).any():
        return None
    step = float(numpy.mean([window.step for window in windows]))

    def told(ranks: numpy.ndarray) -> SlowRank:
        theirs = numpy.isin(last, ranks)
        return SlowRank(
            [int(rank) for rank in ranks], int(theirs.sum()), len(last), float(lead[theirs].mean()),
            step,
        )  # fmt: skip

    late = last[last >= 0]
    rank = told(numpy.array([numpy.bincount(late).argmax()]))
    hosts = windows[-1].hosts
    names, numbers = numpy.unique(hosts[late], return_counts=True)
    of_host = numpy.flatnonzero(hosts == names[numbers.argmax()])
    if len(of_host) < len(hosts) and not rank.is_worth_telling():
        together = told(of_host)
        if together.is_worth_telling():
            return together
    return rank


class StepComparison:
    """Lets the ranks of one module compare their steps, after each COMPARED of them.

    Args:
        reducer: the module's.
    """

    def __init__(self, reducer: ReducerState) -> None:
        self._reducer = weakref.ref(reducer)
        self._windows: deque[Window] = deque(maxlen=_WINDOWS)
        self._pending: Pending | None = None
        self._everyone = numpy.empty(0)
        self._totals = reducer.times.totals()
        # Windows until the same may be told again, twice as many each time.
        self._told: list[int] = []
        self._silent, self._next_silent = 0, 2 * _WINDOWS

    def begin(self) -> None:
        """Tell the others of the last COMPARED steps. Collective, before gradients are reduced."""
        reducer = self._reducer()
        if reducer is None or self._pending is not None:  # begun in a backward that failed
            return
        from mpi4py import MPI  # initialises MPI, which importing this file must not

        totals = reducer.times.totals()
        parts = [now - before for now, before in zip(totals, self._totals, strict=True)]
        self._totals = totals
        host = zlib.crc32(socket.gethostname().encode())
        # Not tensors: the user may have set another device for new ones.
        own = numpy.array([host, *parts, *reducer.times.last_waits()])
        group = reducer.process_group
        self._everyone = numpy.empty((group.size(), own.size))
        communicator, everyone = reducer.channel.communicator, self._everyone
        self._pending = group.pending(
            lambda: communicator.Iallgather(
                [own, own.nbytes, MPI.BYTE], [everyone, own.nbytes, MPI.BYTE]
            ),
            "MPI_Iallgather",
            own,
            everyone,
        )
        self._pending.begin()  # an error of it is raised where it ends

    def end(self) -> None:
        """Take what the others have told, and say which rank is slow. Collective, after that."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        # Metrics must not end a job: a group that is broken says so in its own operations.
        with contextlib.suppress(RuntimeError):
            if pending.wait(_PATIENCE):
                window = Window(self._everyone)
                self._windows.append(window)
                self._show(window)
                self._tell()

    def _show(self, window: Window) -> None:
        """Let `python -m mpiddp.top` see whom this rank waits for."""
        reducer = self._reducer()
        if reducer is not None:
            group = reducer.process_group
            own = group.rank()
            reducer.times.show_comparison(
                window.last, window.waited[own], window.parts[own, 0], group.world_ranks
            )

    @property
    def windows(self) -> list[Window]:
        """What was compared last, at most 100 steps, the oldest first."""
        return list(self._windows)

    @property
    def last(self) -> Window | None:
        """The last 25 steps that were compared; None: there was no comparison yet."""
        return self._windows[-1] if self._windows else None

    def _tell(self) -> None:
        """Name a rank that costs much, on that rank, once and then at doubling intervals."""
        if len(self._windows) < _WINDOWS:
            return
        slow = slowest_of(self.windows)
        if slow is None or not slow.is_worth_telling():
            return
        if slow.ranks != self._told:
            self._told, self._silent, self._next_silent = slow.ranks, 0, 2 * _WINDOWS
        if self._silent > 0:
            self._silent -= 1
            return
        self._silent, self._next_silent = self._next_silent, 2 * self._next_silent
        reducer = self._reducer()
        if reducer is None or reducer.process_group.rank() != slow.ranks[0]:
            return
        with contextlib.suppress(Exception):  # a stream that takes nothing
            print(self._words(slow, reducer), file=sys.stderr, flush=True)

    def _words(self, slow: SlowRank, reducer: ReducerState) -> str:
        world = [reducer.process_group.world_ranks[rank] for rank in slow.ranks]
        host = socket.gethostname()
        if len(world) == 1:
            who, its = f"rank {world[0]} on {host}", "it spends"
        else:
            who, its = f"the {len(world)} ranks on {host}", "they spend"
        return (
            f"mpiddp: the other ranks have waited for {who} in {slow.steps} of the last {slow.of} "
            f"steps, {slow.lost * 1e3:.3g} ms each time, where a step takes "
            f"{slow.step * 1e3:.3g} ms.{self._longer(slow, its)} "
            f"({settings.SLOW_RANKS.name}=0: say nothing)"
        )

    def _longer(self, slow: SlowRank, its: str) -> str:
        """Return which parts of a step take longer there than elsewhere, in a sentence."""
        told = []
        parts = numpy.mean([window.parts for window in self._windows], axis=0)
        theirs = numpy.isin(numpy.arange(len(parts)), slow.ranks)
        for part, words in enumerate(_PARTS, start=1):
            more = parts[theirs, part].mean() - numpy.median(parts[~theirs, part])
            if more > _CAUSE * slow.lost:
                told.append(f"{more * 1e3:.3g} ms {words}")
        return f" More than the others {its} {' and '.join(told)}." if told else ""


def comparison_of(reducer: ReducerState) -> StepComparison | None:
    """Return what compares the steps of a module on the CPU, None where nothing is to be compared.

    Not collective.
    """
    wanted = settings.SLOW_RANKS.read() and reducer.process_group.size() > 1
    on_cpu = all(parameter.device.type == "cpu" for parameter in reducer.parameters)
    return StepComparison(reducer) if wanted and on_cpu else None

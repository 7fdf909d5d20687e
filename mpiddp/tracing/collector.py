"""Keep what happens on this rank while a trace is on, as cheaply as can be: tuples, no words."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from mpiddp.flight_recorder import ring, sources
from mpiddp.tracing.hooks import TorchHooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpiddp.flight_recorder.ring import Taken
    from mpiddp.flight_recorder.sources import Source

__all__ = ["Collector", "Layout", "Reduction", "Region"]


class Region(NamedTuple):
    """What has a beginning and an end in one thread; times in seconds on the monotonic clock."""

    name: str
    thread: int
    began: float
    ended: float


class Reduction(NamedTuple):
    """What a reducer knows of an iteration.

    Attributes:
        source: of its buckets in the flight recorder.
        number: how many there were before.
        thread: in which it ended.
        moments: when forward, backward and communication began; when backward and communication
            ended.
    """

    source: int
    number: int
    thread: int
    moments: tuple[float, float, float, float, float]


class Layout(NamedTuple):
    """Which parameters the buckets of a reducer hold, from one reduction on.

    Attributes:
        source: of its buckets in the flight recorder.
        number: of the reduction.
        layout: which of the reducer's it is.
        names: of each bucket the parameters'.
    """

    source: int
    number: int
    layout: int
    names: list[list[str]]


def _name(reducer: Any, index: int) -> str:
    """Return the name of a parameter, of words such as "parameter 'fc.bias' of shape (5,)"."""
    described: str = reducer.describe_parameter(index)
    quoted = described.split("'")
    return quoted[1] if len(quoted) > 2 else described


class Collector:
    """Collects from its making until `stop`. Not collective.

    Args:
        after_reduction: called at the end of each reduction, when it is kept.
    """

    def __init__(self, after_reduction: Callable[[Any], None]) -> None:
        self.regions: list[Region] = []
        self.reductions: list[Reduction] = []
        self.records: list[Taken] = []
        self.layouts: dict[int, list[Layout]] = {}
        self.sources: dict[int, Source] = {}
        # What measures the bucket sizes of a module, by its source in the flight recorder.
        self.tunings: dict[int, Any] = {}
        self.lost = 0
        self.unfinished: list[int] = []
        self._after_reduction = after_reduction
        self._since = ring.trace(self._take, self._note_reduction)
        self._hooks = TorchHooks(self._note)

    def stop(self) -> None:
        """Collect no more, and take what the flight recorder has."""
        ring.trace(None)
        self._hooks.remove()
        self._take()

    def _note(self, name: str, began: float, ended: float) -> None:
        self.regions.append(Region(name, threading.get_ident(), began, ended))

    def _note_reduction(self, reducer: Any) -> None:
        source, number = reducer.record_source, reducer.reductions - 1
        moments = tuple(reducer.last_moments())
        self.reductions.append(Reduction(source, number, threading.get_ident(), moments))
        layouts = self.layouts.setdefault(source, [])
        if not layouts or layouts[-1].layout != reducer.layout:
            names = [
                [_name(reducer, index) for index in bucket.parameter_indices]
                for bucket in reducer.buckets
            ]
            layouts.append(Layout(source, number, reducer.layout, names))
        if (tuning := getattr(reducer, "tuning", None)) is not None:
            self.tunings[source] = tuning
        self._after_reduction(reducer)

    def _take(self) -> None:
        self._since, records, self.unfinished, lost = ring.take(self._since, self.unfinished)
        self.records += records
        self.lost += lost
        # A source may be gone when the trace ends.
        self.sources.update(sources.known())

"""Read the page in which a rank keeps what it does, see Note [A page for others] in page.pyx.

The sign of the rank tells where the page has what.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BUCKETS", "Act", "Module", "Pace", "Page", "read"]

# As in mpiddp/flight_recorder/sources.py, which needs torch: backward passes above, buckets below.
BUCKETS = 1 << 24

# Seconds that a rank may take to write, for some tens of nanoseconds, if the system lets others run
# meanwhile. One that is stopped there is shown as it is.
_PATIENCE = 0.02
_PAUSE = 1e-4


@dataclass(frozen=True)
class Pace:
    """How many there were, and since when: see Note [Two marks] in page.pyx.

    Attributes:
        count: all.
        last: seconds on the monotonic clock.
        before_count: at an earlier moment.
        before: that moment.
    """

    count: int = 0
    last: float = 0.0
    before_count: int = 0
    before: float = 0.0


@dataclass(frozen=True)
class Act:
    """An operation, or a bucket of gradients. Times are seconds on the monotonic clock.

    Attributes:
        words: what it is.
        source: the name of its group or module, "" if it is not known.
        number: in its source.
        began: when.
        ended: 0: not yet; negative: it was given up.
    """

    words: str
    source: str
    number: int
    began: float
    ended: float


@dataclass(frozen=True)
class Module:
    """The steps of a wrapped module.

    Attributes:
        name: of its class, "" if it is not known.
        source: its number in this rank.
        steps: that have ended.
        step: seconds of the last one.
        exposed: seconds of all steps in which the rank has waited for gradients.
        before_exposed: the same at `steps.before`.
        slowest: the rank for which the others have waited most often, -1: none.
        late: in so many steps.
        compared: of so many, 0: the ranks have not compared their steps.
        waited: seconds that this rank has waited for the last one in the mean step of these.
        mean_step: seconds of the mean step.
    """

    name: str
    source: int
    steps: Pace
    step: float
    exposed: float
    before_exposed: float
    slowest: int
    late: int
    compared: int
    waited: float
    mean_step: float


@dataclass(frozen=True)
class Page:
    """What a rank tells.

    Attributes:
        left: whether it has left its world.
        operation: the last one that it has begun.
        bucket: the last one.
        operations: how many it has begun.
        modules: those that have made a step.
        sources: names of groups and modules that it knows.
    """

    left: bool = False
    operation: Act | None = None
    bucket: Act | None = None
    operations: Pace = Pace()
    modules: list[Module] = field(default_factory=list)
    sources: frozenset[str] = frozenset()


def read(memory: mmap.mmap, layout: Mapping[str, Any]) -> Page:
    """Return what a page tells. Not collective.

    Args:
        memory: the page.
        layout: where it has what, as `page.layout()` returns it.

    Raises:
        ValueError: the layout is not one that this function knows, or is not that of the page.
    """
    try:
        return _parse(_Bytes(_whole(memory, layout), layout))
    except (KeyError, TypeError, IndexError, struct.error) as error:
        raise ValueError(f"what it shows has another form: {error!r}") from error


def _whole(memory: mmap.mmap, layout: Mapping[str, Any]) -> bytes:
    """Return bytes that belong together; those of the last attempt, if a writer stands still."""
    size = int(layout["bytes"])
    start, form = layout["writes"]
    end = start + struct.calcsize(form)
    until = time.monotonic() + _PATIENCE
    while True:
        before = memory[start:end]
        found = memory[:size]
        writes = struct.unpack(form, before)[0] & 1
        if (before == memory[start:end] and not writes) or time.monotonic() > until:
            return found
        if writes:
            time.sleep(_PAUSE)


class _Bytes:
    """A page's bytes, by the names of its layout."""

    def __init__(self, memory: bytes, layout: Mapping[str, Any]) -> None:
        self._memory = memory
        self._layout = layout

    def all(self, name: str, start: int = 0) -> tuple[Any, ...]:
        offset, form = self._layout[name]
        return struct.unpack_from("=" + form, self._memory, start + offset)

    def one(self, name: str, start: int = 0) -> Any:
        return self.all(name, start)[0]

    def text(self, name: str, start: int = 0) -> str:
        words: bytes = self.one(name, start)
        return words.partition(b"\0")[0].decode(errors="replace")

    def places(self, name: str) -> list[int]:
        """Return the offsets of all places of an array."""
        first, size, count = self._layout[name]
        return [first + size * place for place in range(count)]

    def pace(self, name: str, start: int = 0) -> Pace:
        count, last, _, _, before_count, before = self.all(name, start)
        return Pace(count, last, before_count, before)


def _parse(page: _Bytes) -> Page:
    numbered = {}
    for place in page.places("sources"):
        words = page.text("source.words", place)
        if words:
            numbered[page.one("source.number", place)] = words
    return Page(
        bool(page.one("left")),
        _operation(page, numbered),
        _bucket(page, numbered),
        page.pace("operations"),
        [
            _module(page, place, numbered)
            for place in page.places("modules")
            if page.one("module.source", place) >= 0 and page.pace("module.steps", place).count > 0
        ],
        frozenset(numbered.values()),
    )


def _operation(page: _Bytes, sources: Mapping[int, str]) -> Act | None:
    if page.one("operation.id") < 0:
        return None
    words = page.text("operation.name") + page.text("operation.detail")
    dtype = page.text("operation.dtype")
    if dtype:
        shape = page.all("operation.shape")[: max(page.one("operation.dimensions"), 0)]
        words += f" of {dtype} {shape}"
    tensors = page.one("operation.tensors")
    if tensors > 1:
        words += f" and {tensors - 1} more"
    return Act(
        words,
        sources.get(page.one("operation.source"), ""),
        page.one("operation.number"),
        page.one("operation.began"),
        page.one("operation.ended"),
    )


def _bucket(page: _Bytes, sources: Mapping[int, str]) -> Act | None:
    if page.one("bucket.id") < 0:
        return None
    source, number = sources.get(page.one("bucket.source"), ""), page.one("bucket.number")
    backward, index = divmod(number, BUCKETS)
    words = f"bucket {index} of backward pass {backward + 1} of {source or 'a module'}"
    return Act(words, source, number, page.one("bucket.began"), page.one("bucket.ended"))


def _module(page: _Bytes, place: int, sources: Mapping[int, str]) -> Module:
    source = page.one("module.source", place)
    return Module(
        sources.get(source, ""),
        source,
        page.pace("module.steps", place),
        page.one("module.step", place),
        page.one("module.exposed", place),
        page.one("module.before_exposed", place),
        *page.all("module.slowest", place),
        *page.all("module.waited", place),
    )

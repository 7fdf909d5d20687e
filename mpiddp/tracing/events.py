"""Make the events of Chrome's format of what a rank has collected."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mpiddp.flight_recorder.call_text import describe, describe_call, describe_dtype
from mpiddp.flight_recorder.sources import BUCKETS
from mpiddp.tracing.collector import Layout
from mpiddp.tracing.rows import Rows

if TYPE_CHECKING:
    from mpiddp.flight_recorder.ring import Taken
    from mpiddp.tracing.clocks import Clock
    from mpiddp.tracing.collector import Collector

__all__ = ["Events"]

# Of regions the category that torch's profiler gives to what users name.
REGION, BUCKET, COLLECTIVE = "user_annotation", "bucket", "collective"


class Events:
    """The events of one rank. Not collective.

    Args:
        rank: this one.
        clock: that of all ranks.
        collector: what has happened; it has stopped.
    """

    def __init__(self, rank: int, clock: Clock, collector: Collector) -> None:
        self._rank = rank
        self._clock = clock
        self._from = collector
        self._rows = Rows()
        # When it began and ended, the name and the facts: rows are found in order of time.
        self._filled: list[tuple[float, float, str, dict[str, object]]] = []
        # Of the last bucket of each module: the backward pass, its index, when it was full.
        self._before: dict[int, tuple[int, int, float]] = {}

    def all(self, host: str) -> Iterator[dict[str, Any]]:
        """Return all events, the names of rows last."""
        yield from self._regions()
        yield from self._steps()
        records = sorted(self._from.records, key=lambda record: record[5])
        for record in records:
            if record[2] is None:
                yield from self._bucket(record)
            else:
                yield from self._collective(record)
        for began, ended, name, facts in sorted(self._filled, key=lambda each: each[:2]):
            row = self._rows.beside("buckets: filled", began, ended)
            yield self._event(name, BUCKET, row, began, ended, **facts)
        yield from self._rows.metadata(self._rank, host)

    def _event(
        self, name: str, category: str, row: int, began: float, ended: float, **facts: object
    ) -> dict[str, Any]:
        start = self._clock.microseconds(began)
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": self._rank,
            "tid": row,
            "ts": round(start, 3),
            "dur": round(max(self._clock.microseconds(ended) - start, 0.0), 3),
            "args": facts,
        }

    # What threads do.

    def _regions(self) -> Iterator[dict[str, Any]]:
        seen = [region for region in self._from.regions if region.name == "backward"]
        for region in self._from.regions:
            row = self._rows.of_thread(region.thread)
            yield self._event(region.name, REGION, row, region.began, region.ended)
        for reduction in self._from.reductions:
            forward, backward, _, ended, reduced = reduction.moments
            row = self._rows.of_thread(reduction.thread)
            facts = {"backward": reduction.number + 1, "module": self._module(reduction.source)}
            # Of two forwards before one backward, the second is known. A rank without inputs has
            # none of its own.
            if 0 < forward <= backward:
                yield self._event("forward", REGION, row, forward, backward, **facts)
            if not backward <= ended <= reduced:
                continue
            if not any(r.began <= ended <= r.ended and r.thread == reduction.thread for r in seen):
                yield self._event("backward", REGION, row, backward, reduced, **facts)
            yield self._event("wait at the end of backward", REGION, row, ended, reduced, **facts)

    def _steps(self) -> Iterator[dict[str, Any]]:
        """Return the steps of the module that came first, and the time between them.

        A step begins where the optimizer, or else the reduction, of the one before has ended.
        """
        reductions = [
            r for r in self._from.reductions if r.source == self._from.reductions[0].source
        ]
        optimizers = [r for r in self._from.regions if r.name.startswith("optimizer")]
        ends = []
        for place, reduction in enumerate(reductions):
            after = reductions[place + 1].moments[0] if place + 1 < len(reductions) else math.inf
            reduced = reduction.moments[4]
            within = [r.ended for r in optimizers if reduced <= r.began and r.ended <= after]
            ends.append(max([reduced, *within]))
        for place in range(1, len(reductions)):
            forward, began, row = reductions[place].moments[0], ends[place - 1], 0
            row = self._rows.of_thread(reductions[place].thread)
            if began <= forward < ends[place]:
                name = f"ProfilerStep#{reductions[place].number + 1}"
                yield self._event(name, REGION, row, began, ends[place])
                yield self._event("between steps", REGION, row, began, forward)

    # What runs beside them.

    def _module(self, source: int) -> str:
        known = self._from.sources.get(source)
        return "" if known is None else known.module

    def _group(self, source: int) -> dict[str, object]:
        known = self._from.sources.get(source)
        return {} if known is None else {"group": known.name}

    def groups(self) -> list[dict[str, object]]:
        """Return the groups that events name, as torch's profiler does under `pg_config`.

        Their ranks stand here once, since in a large job they are longer than an event.
        """
        used = {record[0] for record in self._from.records}
        return [
            {
                "pg_name": source.name,
                "pg_desc": source.description,
                "backend_config": "mpiddp",
                "pg_size": len(source.ranks),
                "ranks": list(source.ranks),
            }
            for number, source in sorted(self._from.sources.items())
            if number in used
        ]

    def _bucket(self, record: Taken) -> Iterator[dict[str, Any]]:
        source, number, _, elements, dtype, began, _, ended, thread, *moments = record
        filled, full, waited, first, last = moments
        backward, index = divmod(number, BUCKETS)
        which: dict[str, object] = {
            "bucket": index,
            "backward": backward + 1,
            "module": self._module(source),
            **self._group(source),
        }
        facts = {**which, "elements": elements}
        if dtype is not None:
            facts |= {"dtype": describe_dtype(dtype), "bytes": elements * dtype.itemsize}
        facts["parameters"] = self._parameters(source, backward, index)
        name = f"bucket {index}"
        if ended < 0:
            yield self._failure(name, BUCKET, thread, began, facts)
            return
        if 0 < filled <= full <= began:
            self._filled.append((filled, full, f"{name}: filled", facts))
            if self._was_held(source, backward, index, full):
                self._filled.append((full, began, f"{name}: held for an earlier one", which))
        row = self._rows.beside("buckets: launched to reduced", began, ended)
        yield self._event(name, BUCKET, row, began, ended, **facts)
        if first > 0:
            last = min(max(first, last), ended)
            yield self._event(f"{name}: chunks sent", BUCKET, row, first, last, **which)
        if 0 < waited < ended:
            thread_row = self._rows.of_thread(thread)
            yield self._event(f"{name}: waited for", BUCKET, thread_row, waited, ended, **which)

    def _was_held(self, source: int, backward: int, index: int, full: float) -> bool:
        """Return whether a bucket was full before the one that is launched before it."""
        before = self._before.get(source, (-1, -1, 0.0))
        held = before[:2] == (backward, index - 1) and before[2] > full
        self._before[source] = (backward, index, max(full, before[2]) if held else full)
        return held

    def _parameters(self, source: int, backward: int, bucket: int) -> list[str]:
        layouts: list[Layout] = self._from.layouts.get(source, [])
        place = bisect.bisect([layout.number for layout in layouts], backward) - 1
        if place < 0 or bucket >= len(layouts[place].names):
            return []
        return layouts[place].names[bucket]

    def _collective(self, record: Taken) -> Iterator[dict[str, Any]]:
        source, number, call, _, _, began, _, ended, thread, *_ = record
        assert call is not None
        name, detail, dtype, shape, count = call
        facts: dict[str, object] = {
            "call": describe((name, detail, dtype, shape, count)),
            "number": number,
            "tensors": count,
            **self._group(source),
        }
        if dtype is not None:
            # Of the first tensor: the others may have other shapes.
            facts["bytes"] = math.prod(shape) * dtype.itemsize
        shown = describe_call(name, detail)
        if ended < 0:
            yield self._failure(shown, COLLECTIVE, thread, began, facts)
            return
        row = self._rows.beside("collectives", began, ended)
        yield self._event(shown, COLLECTIVE, row, began, ended, **facts)

    def _failure(
        self, name: str, category: str, thread: int, began: float, facts: dict[str, object]
    ) -> dict[str, Any]:
        return {
            "ph": "i",
            "s": "t",
            "cat": category,
            "name": f"{name} has failed",
            "pid": self._rank,
            "tid": self._rows.of_thread(thread),
            "ts": round(self._clock.microseconds(began), 3),
            "args": facts,
        }

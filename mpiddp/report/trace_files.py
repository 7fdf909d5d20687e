"""Read the ranks' files of a trace, line by line, into arrays that are small enough for all ranks.

Times are microseconds on the clock of all ranks, as in the files.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiddp.report import parts
from mpiddp.tracing import merging

__all__ = ["Bucket", "RankTrace", "Trace", "read"]

_STEP = re.compile(r"ProfilerStep#(\d+)")
_FILE = re.compile(r"rank-(\d+)\.json\.gz")
_WAIT = "wait at the end of backward"
# Rows from here on are no threads.
_NO_THREAD = 1000

SPAN = np.dtype([("part", "i1"), ("began", "f8"), ("ended", "f8")])
WAIT = np.dtype([("module", "i4"), ("number", "i4"), ("began", "f8"), ("ended", "f8")])
BUCKET = np.dtype(
    [
        ("module", "i4"),
        ("group", "i4"),
        ("number", "i4"),
        ("bucket", "i4"),
        ("bytes", "f8"),
        ("filled", "f8"),
        ("launched", "f8"),
        ("sent", "f8"),
        ("reduced", "f8"),
    ]
)


@dataclass(frozen=True)
class Bucket:
    """What is in a bucket of a module, as it was in the last step.

    Attributes:
        number: which backward pass that was.
        bytes: of what is sent of its gradients.
        dtype: in which they are sent, such as float32.
        parameters: their names.
    """

    number: int
    bytes: int
    dtype: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class RankTrace:
    """What one rank did.

    Attributes:
        facts: of the file's first line, under "mpiddp".
        numbers: of its steps.
        windows: when each began and ended; of shape (steps, 2).
        spans: of type SPAN, what its thread did.
        waits: of type WAIT, at the ends of backward passes.
        buckets: of type BUCKET; NaN where a moment is not known.
    """

    facts: dict[str, Any]
    numbers: NDArray[np.int64]
    windows: NDArray[np.float64]
    spans: NDArray[Any]
    waits: NDArray[Any]
    buckets: NDArray[Any]

    @property
    def rank(self) -> int:
        """This rank."""
        return int(self.facts["rank"])

    @property
    def error(self) -> float:
        """How wrong its clock can be, in microseconds."""
        return float(self.facts["clock"]["error_us"])


@dataclass
class Trace:
    """The trace of all ranks.

    Attributes:
        world_size: how many ranks the job had.
        ranks: those that there are files of, in order.
        modules: the names of the wrapped modules.
        groups: the names of the process groups that reduce buckets.
        contents: what is in each bucket, by module and number.
        collectives: how often each was called on the first rank, by name.
        optimizers: the names of those that stepped on the first rank, with their class.
        faults: what is wrong with the files, in sentences.
    """

    world_size: int = 0
    ranks: list[RankTrace] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    contents: dict[tuple[int, int], Bucket] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)
    optimizers: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def read(folder: Path) -> Trace:
    """Return the trace in a folder; a file that cannot be read is a fault in it. Not collective.

    Raises:
        ValueError: there is no trace.
    """
    files = {int(m[1]): p for p in (folder / "ranks").glob("*") if (m := _FILE.fullmatch(p.name))}
    if not files:
        raise ValueError(f"{folder} holds no trace: there is no {folder / 'ranks'}/rank-0.json.gz")
    trace = Trace()
    for rank in sorted(files):
        try:
            trace.ranks.append(_Reader(trace, files[rank]).read())
        except (OSError, EOFError, ValueError, KeyError, zlib.error) as error:
            trace.faults.append(f"the file of rank {rank} is left out: {error}")
    if not trace.ranks:
        raise ValueError(f"no file in {folder / 'ranks'} can be read: {trace.faults[0]}")
    missing = trace.world_size - len(files)
    if missing > 0:
        trace.faults.append(
            f"{missing} of {trace.world_size} ranks have left no file: what they did is not seen"
        )
    return trace


class _Reader:
    """Reads one file."""

    def __init__(self, trace: Trace, path: Path) -> None:
        self._trace = trace
        self._path = path
        self._is_first = not trace.ranks
        self._steps: list[tuple[int, float, float, int]] = []
        self._spans: list[tuple[int, float, float, int]] = []
        self._waits: list[tuple[int, int, float, float]] = []
        # By module, group, backward pass and bucket: bytes, filled, launched, sent, reduced.
        self._buckets: dict[tuple[int, int, int, int], list[float]] = {}

    def read(self) -> RankTrace:
        header = merging.header(self._path)
        world_size = int(header["distributedInfo"]["world_size"])
        for event in merging.events(self._path):
            if event["ph"] == "X":
                self._take(event)
        self._trace.world_size = max(self._trace.world_size, world_size)
        steps = sorted(self._steps)
        row = steps[0][3] if steps else 1
        # What another thread does, such as writing a snapshot, does not hold the step up.
        spans = [
            (part, began, ended)
            for part, began, ended, tid in self._spans
            if tid in (1, row) or tid >= _NO_THREAD or part in (parts.FORWARD, parts.BACKWARD)
        ]
        buckets = np.array([(*key, *facts) for key, facts in self._buckets.items()], BUCKET)
        whole = ~(np.isnan(buckets["launched"]) | np.isnan(buckets["reduced"]))
        return RankTrace(
            header["mpiddp"],
            np.array([step[0] for step in steps], np.int64),
            np.array([step[1:3] for step in steps], np.float64).reshape(-1, 2),
            np.array(spans, SPAN),
            np.array(self._waits, WAIT),
            buckets[whole],
        )

    def _take(self, event: dict[str, Any]) -> None:
        name, began = event["name"], event["ts"]
        ended = began + event["dur"]
        if event["cat"] == "bucket":
            self._take_bucket(name, began, ended, event["args"])
        elif event["cat"] == "collective":
            self._spans.append((parts.COLLECTIVES, began, ended, _NO_THREAD))
            if self._is_first:
                counts = self._trace.collectives
                counts[name] = counts.get(name, 0) + 1
        elif name == _WAIT:
            facts = event["args"]
            self._waits.append((self._module(facts), facts["backward"], began, ended))
        elif step := _STEP.fullmatch(name):
            self._steps.append((int(step[1]), began, ended, event["tid"]))
        elif (part := parts.part_of(name)) is not None:
            self._spans.append((part, began, ended, event["tid"]))
            if part == parts.OPTIMIZER and self._is_first:
                _number_of(name.removeprefix("optimizer: "), self._trace.optimizers)

    def _take_bucket(self, name: str, began: float, ended: float, facts: dict[str, Any]) -> None:
        module, group = self._module(facts), self._group(facts)
        number, bucket = facts["backward"], facts["bucket"]
        row = self._buckets.setdefault((module, group, number, bucket), [0, *[np.nan] * 4])
        _, _, what = name.partition(": ")
        if what == "filled":
            row[1] = began
        elif what == "chunks sent":
            row[3] = began
        if what:
            return
        size = facts.get("bytes", 0)
        row[0], row[2], row[4] = size, began, ended
        known = self._trace.contents.get((module, bucket))
        if self._is_first and (known is None or number >= known.number):
            names = tuple(facts["parameters"])
            content = Bucket(number, int(size), facts.get("dtype", ""), names)
            self._trace.contents[module, bucket] = content

    def _module(self, facts: dict[str, Any]) -> int:
        return _number_of(facts["module"], self._trace.modules)

    def _group(self, facts: dict[str, Any]) -> int:
        return _number_of(facts.get("group", ""), self._trace.groups)


def _number_of(value: Any, known: list[Any]) -> int:
    if value not in known:
        known.append(value)
    return known.index(value)

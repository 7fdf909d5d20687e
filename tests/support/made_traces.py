"""Traces of a job that was made up, so that one knows what a report of it must say."""

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mpiddp.tracing import merging

# Milliseconds of a rank in a step.
Times = Callable[[int, int], float]


def always(milliseconds: float) -> Times:
    return lambda rank, step: milliseconds


@dataclass
class MadeJob:
    """A job of one module. All times in milliseconds.

    In each step a rank loads data, goes forward, rests (the loss), goes backward, and steps the
    optimizer. Buckets are launched at equal times of backward, the last one where it ends. One
    travels after the other, from when all ranks have launched it.
    """

    ranks: int = 4
    steps: int = 20
    to_a_node: int = 2
    data: Times = field(default=always(1))
    forward: Times = field(default=always(10))
    loss: Times = field(default=always(0))
    backward: Times = field(default=always(20))
    optimizer: Times = field(default=always(2))
    buckets: int = 4
    bucket_bytes: int = 4 << 20
    dtype: str = "float32"
    travel: float = 1
    # Before a bucket is sent, while backward runs; and whether the transport sends chunks.
    idle: float = 0
    chunks: bool = False
    clock_error: float = 0.001
    facts: dict = field(default_factory=dict)
    # Other events of a rank in a step: name, category, began after its data, length.
    more: Callable[[int, int], Iterable[tuple[str, str, float, float]]] = lambda rank, step: ()

    def write(self, folder: Path, only: Iterable[int] | None = None) -> Path:
        """Write the files of all ranks, or of some; return the folder."""
        events = {rank: [] for rank in (range(self.ranks) if only is None else only)}
        starts = [0.0] * self.ranks
        for step in range(1, self.steps + 1):
            starts = self._step(events, step, starts)
        for rank, lines in events.items():
            self._write_rank(merging.path_of(folder, rank), rank, lines)
        return folder

    def _step(self, events, step, starts):
        everybody = range(self.ranks)
        forward = [starts[r] + self.data(r, step) for r in everybody]
        backward = [forward[r] + self.forward(r, step) + self.loss(r, step) for r in everybody]
        ended = [backward[r] + self.backward(r, step) for r in everybody]
        launched = [
            [backward[r] + self.backward(r, step) * (k + 1) / self.buckets for r in everybody]
            for k in range(self.buckets)
        ]
        over = max(ended)
        turns, reduced, last = [], [], 0.0
        for times in launched:
            turn = max(max(times), last)
            begins = turn + (self.idle if turn < over else 0)
            last = begins + self.travel
            turns.append(begins)
            reduced.append(last)
        for r in events:
            shown = events[r]
            add = lambda *event, shown=shown, r=r: shown.append(_event(r, *event))  # noqa: E731
            facts = {"backward": step, "module": "Net"}
            add("DataLoader.__next__", "user_annotation", starts[r], forward[r])
            add("forward", "user_annotation", forward[r], forward[r] + self.forward(r, step), facts)
            add("backward", "user_annotation", backward[r], last)
            add("wait at the end of backward", "user_annotation", ended[r], last, facts)
            finish = last + self.optimizer(r, step)
            add("optimizer: SGD.step", "user_annotation", last, finish)
            for name, category, after, length in self.more(r, step):
                add(name, category, forward[r] + after, forward[r] + after + length, {})
            if step > 1:
                add(f"ProfilerStep#{step}", "user_annotation", starts[r], finish)
                add("between steps", "user_annotation", starts[r], forward[r])
            for k in range(self.buckets):
                self._bucket(add, step, k, backward[r], launched[k][r], turns[k], reduced[k])
        return [last + self.optimizer(r, step) for r in everybody]

    def _bucket(self, add, step, number, began, launched, sent, reduced):
        facts = {
            "bucket": number,
            "backward": step,
            "module": "Net",
            "group": "0, module 1",
            "bytes": self.bucket_bytes,
            "dtype": self.dtype,
            "parameters": [f"layer{number}.weight", f"layer{number}.bias"],
        }
        add(f"bucket {number}", "bucket", launched, reduced, facts)
        add(f"bucket {number}: filled", "bucket", began, launched, facts)
        if self.chunks:
            add(f"bucket {number}: chunks sent", "bucket", max(launched, sent), reduced, facts)

    def _write_rank(self, path, rank, events):
        path.parent.mkdir(parents=True, exist_ok=True)
        node = rank // self.to_a_node
        facts = {
            "rank": rank,
            "host": f"n{node}",
            "node": node,
            "lost": 0,
            "clock": {"error_us": self.clock_error * 1e3, "aligned_at_end": True},
            **self.facts,
        }
        world = {"backend": "mpiddp", "rank": rank, "world_size": self.ranks}
        with gzip.open(path, "wt", 1) as out:
            out.write(f'{{"distributedInfo": {json.dumps(world)}, "mpiddp": {json.dumps(facts)}, ')
            out.write(merging.FIRST_LINE + ",\n".join(map(json.dumps, events)))
            out.write("\n" + merging.LAST_LINE)


def _event(rank, name, category, began, ended, facts=None):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": rank,
        "tid": 1000 if category != "user_annotation" else 1,
        "ts": round(began * 1e3, 3),
        "dur": round((ended - began) * 1e3, 3),
        "args": facts or {},
    }

"""What a report says, as numbers: for the text, the page and JSON alike.

Times are milliseconds here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiddp.report import bucket_times, odd_steps, parts, slow_ranks
from mpiddp.report.bucket_times import CAUSES, BucketTimes
from mpiddp.report.steps import Steps, take_apart
from mpiddp.report.trace_files import Trace

__all__ = ["Summary", "summarize"]


@dataclass(frozen=True)
class Summary:
    """All numbers of a report.

    Attributes:
        trace: of all ranks.
        steps: taken apart.
        buckets: how each travelled, by module and number.
        slow: ranks or nodes that the others wait for.
        odd: steps that stand out.
    """

    trace: Trace
    steps: Steps
    buckets: dict[tuple[int, int], BucketTimes]
    slow: list[slow_ranks.Slow]
    odd: list[odd_steps.OddStep]

    @property
    def step(self) -> float:
        """How long a step is, in the mean of all ranks and steps."""
        return float(self.steps.durations.mean()) / 1e3

    @property
    def mean(self) -> dict[int, float]:
        """How long each part is, in the mean of all ranks and steps."""
        means = self.steps.times.mean(axis=(0, 1), dtype=float) / 1e3
        return {part: float(means[part]) for part in parts.NAMES}

    @property
    def by_rank(self) -> NDArray[np.float64]:
        """How long each part is on each rank, in the mean of all steps."""
        means: NDArray[np.float64] = self.steps.times.mean(axis=1, dtype=float) / 1e3
        return means

    @property
    def nodes(self) -> NDArray[np.int64]:
        """The node of each rank."""
        return np.array([int(rank.facts["node"]) for rank in self.trace.ranks])

    @property
    def clock_error(self) -> float:
        """How wrong a clock can be, in microseconds."""
        return max(rank.error for rank in self.trace.ranks)

    @property
    def hidden(self) -> float:
        """How long communication is hidden behind backward, a step of a rank."""
        return float(self.steps.reductions.hidden.mean()) / 1e3

    @property
    def exposed(self) -> float:
        """How long it is not."""
        return float(self.steps.reductions.exposed.mean()) / 1e3

    @property
    def hidden_share(self) -> float | None:
        """What part of communication is hidden, None where there is none."""
        whole = self.hidden + self.exposed
        return self.hidden / whole if whole else None

    def by_node(self) -> list[tuple[int, str, int, NDArray[np.float64]]]:
        """Return number, host, ranks and the mean parts of each node. Not collective."""
        means, nodes, found = self.by_rank, self.nodes, []
        for node in np.unique(nodes):
            here = nodes == node
            host = str(self.trace.ranks[int(np.argmax(here))].facts["host"])
            found.append((int(node), host, int(here.sum()), means[here].mean(axis=0)))
        return found

    def per_step(self, times: BucketTimes, microseconds: float) -> float:
        """Return what a sum of a bucket is in a step of a rank. Not collective."""
        return microseconds / 1e3 / self.steps.durations.size

    def as_json(self, findings: list[Any]) -> dict[str, Any]:
        """Return it as what JSON can hold. Not collective.

        Args:
            findings: what is said of it, as dictionaries.
        """
        steps = self.steps
        names = [parts.NAMES[part] for part in sorted(parts.NAMES)]

        def named(values: NDArray[np.float64]) -> dict[str, float]:
            return {name: round(float(v), 4) for name, v in zip(names, values, strict=True)}

        return {
            "world_size": self.trace.world_size,
            "ranks": [
                {
                    "rank": rank.rank,
                    "host": rank.facts["host"],
                    "node": rank.facts["node"],
                    "clock_error_us": rank.error,
                    "step_ms": round(float(steps.durations[place].mean()) / 1e3, 4),
                    "parts_ms": named(self.by_rank[place]),
                }
                for place, rank in enumerate(self.trace.ranks)
            ],
            "steps": [
                {
                    "number": int(number),
                    "ms": round(float(steps.durations[:, place].max()) / 1e3, 4),
                }
                for place, number in enumerate(steps.numbers)
            ],
            "step_ms": round(self.step, 4),
            "parts_ms": named(steps.times.mean(axis=(0, 1), dtype=float) / 1e3),
            "communication": {
                "hidden_ms": round(self.hidden, 4),
                "exposed_ms": round(self.exposed, 4),
                "hidden_share": self.hidden_share,
            },
            "buckets": [
                {
                    "module": self.trace.modules[module],
                    "bucket": number,
                    "bytes": self.trace.contents[module, number].bytes,
                    "parameters": list(self.trace.contents[module, number].parameters),
                    "travelled_ms": round(self.per_step(times, times.travelled), 4),
                    "exposed_ms": {
                        name: round(self.per_step(times, float(times.exposed[why])), 4)
                        for why, name in CAUSES.items()
                    },
                }
                for (module, number), times in sorted(self.buckets.items())
                if (module, number) in self.trace.contents
            ],
            "slow": [
                {
                    "rank": slow.rank,
                    "node": slow.node,
                    "host": slow.host,
                    "first_step": slow.first,
                    "last_step": slow.last,
                    "slowest_in": slow.slowest,
                    "of_steps": slow.steps,
                    "others_wait_ms": round(slow.cost / 1e3, 4),
                    "longer_part": parts.NAMES[slow.longer[0]],
                    "longer_ms": round(slow.longer[1] / 1e3, 4),
                }
                for slow in self.slow
            ],
            "odd_steps": [
                {
                    "number": odd.number,
                    "ms": round(odd.duration / 1e3, 4),
                    "rank": odd.rank,
                    "part": parts.NAMES[odd.part],
                    "more_ms": round(odd.more / 1e3, 4),
                }
                for odd in self.odd
            ],
            "findings": findings,
        }


def summarize(trace: Trace) -> Summary:
    """Return the numbers of a trace. Not collective.

    Raises:
        ValueError: no step is on all ranks from its beginning to its end.
    """
    steps = take_apart(trace)
    return Summary(
        trace,
        steps,
        bucket_times.sum_up(steps.reductions.travels),
        slow_ranks.find(trace.ranks, steps),
        odd_steps.find(trace.ranks, steps),
    )

"""The tables of a report, as rows of words: the text and the page show the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpiddp.report import parts
from mpiddp.report.bucket_advice import megabytes, parameters_of
from mpiddp.report.bucket_times import CAUSES
from mpiddp.report.summary import Summary

__all__ = ["Table", "headline", "overlap_line", "tables"]

# More rows than that help nobody: the slowest are shown.
_MOST_ROWS = 16

# Of a sum of microseconds, what has no cause.
_LITTLE = 0.5

# What is shown of each rank and node; the others are in "other".
_COLUMNS = {
    "forward": (parts.FORWARD,),
    "backward": (parts.BACKWARD,),
    "exposed": (parts.EXPOSED,),
    "waiting": (parts.WAITING,),
    "optimizer": (parts.OPTIMIZER,),
    "data": (parts.DATA,),
    "other": (parts.LOSS, parts.COLLECTIVES, parts.CHECKPOINT, parts.OTHER),
}


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: what it shows.
        head: the names of the columns.
        rows: as many words each.
        words: how many columns from the left are words; the others are numbers.
        note: what is to be said below, "" for nothing.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    note: str = ""


def headline(summary: Summary) -> str:
    """Return what was traced, in a line. Not collective."""
    numbers, ranks = summary.steps.numbers, summary.trace.ranks
    nodes = len(np.unique(summary.nodes))
    return (
        f"{_count(len(ranks), 'rank')} on {_count(nodes, 'node')}, {_count(len(numbers), 'step')} "
        f"({numbers[0]} to {numbers[-1]}), {summary.step:.1f} ms each in the mean; "
        f"clocks are right to "
        f"{summary.clock_error:.0f} µs"
    )


def overlap_line(summary: Summary) -> str:
    """Return how much communication is hidden, in a line. Not collective."""
    share = summary.hidden_share
    if share is None:
        return "No gradients were reduced."
    return (
        f"{100 * share:.0f} % of communication is hidden behind backward: "
        f"{summary.hidden:.1f} ms of "
        f"{summary.hidden + summary.exposed:.1f} ms a step."
    )


def tables(summary: Summary) -> list[Table]:
    """Return all tables. Not collective."""
    made = [_parts(summary), _by_rank(summary)]
    if len(np.unique(summary.nodes)) > 1:
        made.append(_by_node(summary))
    if summary.buckets:
        made.append(_buckets(summary))
    if summary.odd:
        made.append(_odd(summary))
    return made


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _parts(summary: Summary) -> Table:
    mean, by_rank = summary.mean, summary.by_rank
    rows = [
        (
            name,
            f"{mean[part]:.2f}",
            f"{100 * mean[part] / summary.step:.0f}",
            f"{by_rank[:, part].min():.2f}",
            f"{by_rank[:, part].max():.2f}",
        )
        for part, name in parts.NAMES.items()
        if mean[part] or part not in (parts.CHECKPOINT, parts.COLLECTIVES, parts.LOSS)
    ]
    return Table(
        "Where the time of a step goes",
        ("part", "mean ms", "%", "least of a rank", "most of a rank"),
        rows,
    )


def _cells(means: NDArray[np.float64]) -> list[str]:
    sums = [float(sum(means[part] for part in which)) for which in _COLUMNS.values()]
    return [f"{value:.2f}" for value in (float(means.sum()), *sums)]


def _by_rank(summary: Summary) -> Table:
    means = summary.by_rank
    late = summary.steps.reductions.late.mean(axis=1) / 1e3
    rows = [
        (str(rank.rank), str(rank.facts["host"]), *_cells(means[place]), f"{late[place]:.2f}")
        for place, rank in enumerate(summary.trace.ranks)
    ]
    rows, note = _fewer(rows, late, "ranks")
    explained = "late: how much later than the first rank it has launched its last bucket"
    return Table(
        "By rank, in ms a step",
        ("rank", "host", "step", *_COLUMNS, "late"),
        rows,
        2,
        f"{explained}. {note}" if note else f"{explained}.",
    )


def _by_node(summary: Summary) -> Table:
    late = summary.steps.reductions.late.mean(axis=1) / 1e3
    nodes, means = summary.nodes, summary.by_node()
    of_node = np.array([late[nodes == node].mean() for node, *_ in means])
    rows = [
        (str(node), host, str(ranks), *_cells(values), f"{of_node[place]:.2f}")
        for place, (node, host, ranks, values) in enumerate(means)
    ]
    rows, note = _fewer(rows, of_node, "nodes")
    head = ("node", "host", "ranks", "step", *_COLUMNS, "late")
    return Table("By node, in ms a step of a rank", head, rows, 2, note)


def _fewer(
    rows: list[tuple[str, ...]], late: NDArray[np.float64], what: str
) -> tuple[list[tuple[str, ...]], str]:
    if len(rows) <= _MOST_ROWS:
        return rows, ""
    shown = np.sort(np.argsort(-late, kind="stable")[:_MOST_ROWS])
    note = f"Of {len(rows)} {what}, the {_MOST_ROWS} that are last most are shown."
    return [rows[place] for place in shown], note


def _buckets(summary: Summary) -> Table:
    several = len({module for module, _ in summary.buckets}) > 1
    cost: list[float] = []
    rows: list[tuple[str, ...]] = []
    for (module, number), times in sorted(summary.buckets.items()):
        bucket = summary.trace.contents.get((module, number))
        exposed = float(times.exposed.sum())
        why = CAUSES[int(np.argmax(times.exposed))] if exposed >= _LITTLE else ""
        name = f"{summary.trace.modules[module]} {number}" if several else str(number)
        cost.append(exposed)
        rows.append(
            (
                name,
                why,
                "" if bucket is None else parameters_of(bucket.parameters),
                "" if bucket is None else megabytes(bucket.bytes),
                f"{summary.per_step(times, times.travelled):.2f}",
                f"{summary.per_step(times, exposed):.2f}",
            )
        )
    rows, note = _fewer(rows, np.array(cost), "buckets")
    return Table(
        "Buckets, in ms a step",
        ("bucket", "why exposed", "parameters", "size", "travels", "exposed"),
        rows,
        3,
        note.replace("that are last most", "that are exposed most"),
    )


def _odd(summary: Summary) -> Table:
    rows = [
        (
            str(odd.number),
            f"{parts.NAMES[odd.part]} on rank {odd.rank}, {odd.more / 1e3:.1f} ms more than mostly",
            f"{odd.duration / 1e3:.1f}",
            f"{odd.times:.1f}",
        )
        for odd in summary.odd
    ]
    return Table("Steps that stand out", ("step", "what took longer", "ms", "times the median"),
                 rows, 2)  # fmt: skip

"""The lines and cells that are shown of a job, for a pipe and for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mpiddp.top.jobs import Job, Row

__all__ = ["Table", "printable", "ranks_in_short", "summary", "table"]

# Columns from which on there is room for more.
_WIDE, _WIDER = 80, 110
# Seconds from which on it is said for how long a rank does what it does.
_WHILE = 1.0


@dataclass(frozen=True)
class Table:
    """What is shown of the ranks of a job.

    Attributes:
        titles: of the columns. The last one takes the room that is left.
        rows: of each rank, as many words.
        marked: which of the rows are those of ranks that others wait for, or that are stopped.
    """

    titles: list[str]
    rows: list[list[str]]
    marked: list[bool]


def summary(job: Job) -> str:
    """Return what a job does, in a line. Not collective."""
    here = sorted({row.rank.rank for row in job.rows})
    of = f" of {job.size}" if job.size else ""
    ranks = f"rank{'s' * (len(here) > 1)} {ranks_in_short(here)}{of}"
    parts = [ranks, *_pace(job)]
    if job.awaited:
        many = len(job.awaited) > 1
        parts.append(
            f"rank{'s' * many} {ranks_in_short(job.awaited)} {'are' if many else 'is'} awaited"
        )
    elif slowest := _slowest(job):
        parts.append(slowest)
    name = f" ({job.name})" if job.name else ""
    return printable(f"{job.command or 'a job'}{name}: {'; '.join(parts)}")


def _pace(job: Job) -> list[str]:
    steps = [row.steps for row in job.rows if row.steps is not None]
    if not steps:
        rates = [row.operations_per_second for row in job.rows]
        known = [rate for rate in rates if rate is not None]
        return [f"{_number(max(known))} operations a second"] if known else []
    if job.still is not None:
        return [f"step {max(steps)}, none for {_seconds(job.still)}"]
    rates = [row.steps_per_second for row in job.rows]
    known = [rate for rate in rates if rate is not None]
    return [f"step {max(steps)}" + (f", {_number(min(known))} a second" if known else "")]


def _slowest(job: Job) -> str:
    """Return who was late in the steps that the ranks have compared last; "" if nobody was."""
    for row in job.rows:
        module = row.module
        if module is not None and row.slowest >= 0 and module.late:
            return f"rank {row.slowest} was the last in {module.late} of {module.compared} steps"
    return ""


def table(job: Job, width: int | None = None) -> Table:
    """Return the cells of a job's ranks. Not collective.

    Args:
        job: as it was looked at.
        width: columns that there are; None: as many as it takes.
    """
    room = _WIDER if width is None else width
    columns: list[tuple[str, Callable[[Row], str]]] = [("RANK", lambda row: str(row.rank.rank))]
    if any(row.module is not None for row in job.rows):
        columns += [
            ("STEP", lambda row: "-" if row.steps is None else str(row.steps)),
            ("STEP/S", lambda row: _number(row.steps_per_second)),
            ("WAIT", lambda row: _percent(row.exposed)),
        ]
        if room >= _WIDER:
            columns.append(("LAST", lambda row: _percent(row.waiting)))
    columns.append(("FOR", _waits_for))
    if room >= _WIDER or not any(row.module is not None for row in job.rows):
        columns.append(("OP/S", lambda row: _number(row.operations_per_second)))
    if room >= _WIDE:
        columns += [
            ("CPU", lambda row: _percent(row.processor)),
            ("MEM", lambda row: _bytes(row.rank.usage.memory)),
            ("PID", lambda row: str(row.rank.process_id)),
        ]
    columns.append(("NOW", _now))
    return Table(
        [title for title, _ in columns],
        [[printable(cell(row)) for _, cell in columns] for row in job.rows],
        [row.rank.rank in job.awaited or row.rank.usage.state in "Tt" for row in job.rows],
    )


def _waits_for(row: Row) -> str:
    if row.awaited:
        return ranks_in_short(row.awaited)
    if row.slowest in (-1, row.rank.rank) or not row.waiting:
        return "-"
    return str(row.slowest)


def _now(row: Row) -> str:
    doing = row.doing
    if doing.since is None or doing.since < _WHILE:
        return doing.words
    return f"{_seconds(doing.since)}: {doing.words}"


def ranks_in_short(ranks: Iterable[int]) -> str:
    """Return "0-3,7". Not collective."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def printable(text: str) -> str:
    """Return a text without what would steer a terminal. Not collective."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == 0 or value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f}%"


def _seconds(seconds: float) -> str:
    """Return "34 s", "5 min" or "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _bytes(count: int) -> str:
    """Return "512M" or "1.4G", in powers of 1024 as of top."""
    size, unit = count / 1024**2, "M"
    if size >= 1024:
        size, unit = size / 1024, "G"
    return f"{size:.1f}{unit}" if size < 10 else f"{size:.0f}{unit}"

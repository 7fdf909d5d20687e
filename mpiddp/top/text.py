"""What is shown as plain text, once: for a pipe, and where rich is missing."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from mpiddp.top.cells import Table, summary, table
from mpiddp.top.jobs import Job

__all__ = ["NOBODY", "as_text"]

NOBODY = "no rank of mpiddp runs here as this user"


def as_text(host: str, jobs: Sequence[Job], width: int | None = None, mixed: bool = False) -> str:
    """Return all jobs of a host, with a line's end. Not collective.

    Args:
        host: its name.
        jobs: as they were looked at.
        width: columns that there are; None: as many as it takes.
        mixed: whether lines of other hosts may come between, so that each is to name its own.
    """
    if not jobs:
        return f"{host}: {NOBODY}\n"
    lines: list[str] = []
    for job in jobs:
        told = f"{host}: {summary(job)}"
        lines += [told] if width is None else textwrap.wrap(told, width)
        rows = _aligned(table(job, width))
        lines += [f"{host}: {row}" for row in rows] if mixed else [row[:width] for row in rows]
    return "\n".join(lines) + "\n"


def _aligned(cells: Table) -> list[str]:
    """Return lines with the cells of each column below each other, numbers to the right."""
    rows = [cells.titles, *cells.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [
                *(cell.rjust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)),
                row[-1],
            ]
        )
        for row in rows
    ]

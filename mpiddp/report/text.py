"""The report as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from mpiddp.findings import Finding
from mpiddp.report.summary import Summary
from mpiddp.report.tables import Table, headline, overlap_line, tables

__all__ = ["write"]

_WIDTH = 100
# Words of a cell that are not cut.
_WIDEST = 56


def write(summary: Summary, findings: Sequence[Finding]) -> str:
    """Return the whole text. Not collective."""
    blocks = [headline(summary), _findings(findings)]
    for table in tables(summary):
        blocks.append(_table(table))
        if table.title.startswith("Where"):
            blocks.append(overlap_line(summary))
    return "\n\n".join(blocks)


def _findings(findings: Sequence[Finding]) -> str:
    lines = ["What to change"]
    for place, finding in enumerate(findings, 1):
        number = f"{place}. "
        lines.append(_fill(finding.text[0].upper() + finding.text[1:] + ".", number, 2))
        if finding.remedy:
            lines.append(_fill(finding.remedy, "-> ", 5))
    return "\n".join(lines)


def _fill(text: str, mark: str, indent: int) -> str:
    first = " " * indent + mark
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table(table: Table) -> str:
    cells = [[_cut(cell) for cell in row] for row in (table.head, *table.rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.head))]
    lines = [table.title]
    for row in cells:
        shown = [
            cell.ljust(width) if column < table.words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(shown)}".rstrip())
    if table.note:
        lines.append(_fill(table.note, "", 2))
    return "\n".join(lines)


def _cut(cell: str) -> str:
    return cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 3]}..."

"""Say where the time of the steps in a trace went, and what to change.

    python -m mpiddp.report [--html FILE] [--json] FOLDER

FOLDER is that of a trace: `python -m mpiddp --trace FOLDER train.py` makes one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mpiddp.findings import Finding
from mpiddp.report import advice, page, summary, text, trace_files

__all__ = ["main"]


def main(arguments: Sequence[str], name: str = "python -m mpiddp.report") -> int:
    """Print the report and write the page; return the exit status. Not collective.

    Args:
        arguments: the command line, after the name.
        name: what the user has typed for this command.
    """
    parser = argparse.ArgumentParser(
        prog=name,
        description="Say where the time of the steps in a trace went, and what to change.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="that of a trace")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="where to write the page with charts (default: FOLDER/report.html)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead, and write no page")
    options = parser.parse_args(arguments)
    try:
        numbers = summary.summarize(trace_files.read(options.folder))
    except ValueError as error:
        print(f"mpiddp.report: {error}", file=sys.stderr)
        return 1
    findings = advice.findings(numbers)
    if options.json:
        print(json.dumps(numbers.as_json([asdict(finding) for finding in findings]), indent=1))
        return 0
    print(text.write(numbers, findings))
    return _write_page(numbers, findings, options.html, options.folder / "report.html")


def _write_page(
    numbers: summary.Summary,
    findings: Sequence[Finding],
    wanted: Path | None,
    usual: Path,
) -> int:
    path = wanted or usual
    try:
        page.write(path, numbers, findings)
    except page.NoCharts as error:
        # Who has not asked for it has the text.
        print(f"\nmpiddp.report: {error}", file=sys.stderr)
        return 0 if wanted is None else 1
    except OSError as error:
        print(f"\nmpiddp.report: {path} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"\nCharts: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

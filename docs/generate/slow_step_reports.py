"""What the report said of trainings with a planted fault: benchmarks/results/slow-steps/*.txt."""

from __future__ import annotations

from benchmark_results import ROOT

__all__ = ["PICTURES", "first_finding", "whole"]

_FOLDER = ROOT / "benchmarks" / "results" / "slow-steps"
# Pictures that stand beside the page that shows them.
PICTURES = "benchmarks/results/slow-steps/*.png"


def whole(case: str) -> str:
    """Return a report as it was printed."""
    return _fenced((_FOLDER / f"{case}.txt").read_text(encoding="utf-8"))


def first_finding(case: str) -> str:
    """Return the first line of a report, and the first thing to change."""
    lines = (_FOLDER / f"{case}.txt").read_text(encoding="utf-8").splitlines()
    first = lines.index("What to change") + 1
    rest = lines[first + 1 :]
    length = next(
        place for place, line in enumerate(rest) if not line or line.lstrip().startswith("2. ")
    )
    return _fenced("\n".join([lines[0], "", *lines[first - 1 : first + 1 + length]]))


def _fenced(text: str) -> str:
    return f"```text\n{text.strip()}\n```"

"""The tables of what the tests have run on, from tests/results/runs.jsonl.

`launch.py --record` writes that file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmark_results import markdown

RUNS = Path(__file__).resolve().parents[2] / "tests" / "results" / "runs.jsonl"

# What the arguments of a run are called.
WORDS = {
    "": "all tests",
    "--slow": "all tests",
    "--short": "`make test`",
    "--rest": "what `make test` leaves out",
    "-m essential": "the tier `essential`",
    "-m essential and (mpi or smoke)": "those of the tier `essential` for ranks, and `smoke`",
    "-m smoke": "the tier `smoke`",
    "-m mpi": "all tests for ranks",
}


def runs() -> list[dict[str, Any]]:
    """Return the runs, by torch, Python and MPI."""
    found = [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]
    return sorted(found, key=lambda run: (*map(_numbers, (run["torch"], run["python"])), str(run)))


def versions() -> str:
    """Return a table of the runs."""
    head = ["PyTorch", "Python", "MPI", "tests", "ranks", "passed", "failed", "skipped", "on"]
    return markdown([head, *map(_row, runs())])


def _row(run: dict[str, Any]) -> list[str]:
    what = run["tests"]
    return [
        run["torch"],
        run["python"],
        " and ".join(run["mpi"]),
        WORDS.get(what, f"`{what}`"),
        ", ".join(map(str, run["ranks"])),
        *(str(run[name]) for name in ("passed", "failed", "skipped")),
        f"{run['date']}, {run['commit']}",
    ]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]

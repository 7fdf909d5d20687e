"""What the tables of measured results share: the files of results, and how figures are shown.

What counts as a figure, a ratio and its spread is in benchmarks/measuring.py. Importing this file
lets others import what lies there.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "benchmarks") not in sys.path:
    sys.path.append(str(ROOT / "benchmarks"))

from measuring import Record, Samples  # noqa: E402

# The file of each MPI, benchmarks/results/NAME.json, and what it is called.
MPIS = {"openmpi": "Open MPI", "mpich": "MPICH"}


def load(name: str) -> Record:
    """Return a file of results; "openmpi" is benchmarks/results/openmpi.json."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    results: Record = json.loads(path.read_text(encoding="utf-8"))
    return results


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table; the first is the heading."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, f"| {' | '.join('---' for _ in rows[0])} |")
    return "\n".join(lines)


def milliseconds(seconds: Samples) -> str:
    """Return a median for a table: fewer digits the larger it is."""
    value = 1e3 * statistics.median(seconds)
    digits = 2 if abs(value) < 2 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"


def show_bytes(size: int) -> str:
    """Return a size in whole units."""
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def describe(results: Record, name: str) -> str:
    """Return what the figures of the file `name` depend on, in a sentence."""
    machine = results["machine"]
    mpi = " ".join(machine["mpi"].split(",")[0].replace("Version:", "").split())
    return (
        f"{mpi}, {machine['cores']} cores of {machine['processor']}, "
        f"torch {machine['versions']['torch']}, Python {machine['python']}, "
        f"Linux {machine['system'].split('-')[1]}; `benchmarks/results/{name}.json`, begun at "
        f"commit {machine['commit']}."
    )


def alone(record: Record) -> Samples:
    """Return the seconds of a step of one model without averaging, of all candidates."""
    return [s for each in record["records"] if any(each["alone"]) for s in each["alone"]]


def candidates(record: Record, views: bool) -> dict[str, Record]:
    """Return what was measured of each candidate with or without views, by its name."""
    return {r["candidate"]: r for r in record["records"] if r["views"] in (views, None)}

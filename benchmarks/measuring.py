"""Medians, ratios and their spread; what the machine is. No MPI, no torch.

Two candidates are compared by the ratio of their medians over the rounds. Its spread is what
90 % of 1000 samples of the rounds give, drawn with replacement, the same rounds for both: a
slow round slows both.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from names import HOOKED

SAMPLES = 1000

# What a benchmark writes about one thing that it measured, and seconds, one for each round.
Record = dict[str, Any]
Samples = list[float]


def exposed(record: Record) -> Samples:
    """Return the seconds that synchronisation added to a step, for each round."""
    pairs = zip(record["synchronised"], record["alone"], strict=True)
    return [synchronised - alone for synchronised, alone in pairs]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the ratio of the medians of `ours` to `theirs`, and the ends of its spread.

    None where `theirs` is not clearly above zero: then there is nothing to divide by.
    """
    generator = random.Random(1)
    rounds = range(min(len(ours), len(theirs)))
    sampled = []
    for _ in range(SAMPLES):
        drawn = generator.choices(rounds, k=len(rounds))
        below = statistics.median(theirs[index] for index in drawn)
        if below > 0:
            sampled.append(statistics.median(ours[index] for index in drawn) / below)
    below = statistics.median(theirs)
    if below <= 0 or len(sampled) < 0.95 * SAMPLES:
        return None
    sampled.sort()
    low, high = sampled[len(sampled) // 20], sampled[-1 - len(sampled) // 20]
    return statistics.median(ours) / below, low, high


def wire_seconds(record: Record, size: int) -> float:
    """Return how long a host's link needs for gradients of `size` bytes, without headers."""
    nodes: int = record["nodes"]
    return float(2 * (nodes - 1) / nodes * size * 8 / (record["gigabits"] * 1e9))


def own_wire_seconds(record: Record, candidate: str) -> float:
    """Return the wire time of what a candidate sends."""
    in_16_bits = candidate in HOOKED
    return wire_seconds(record, 2 * record["elements"] if in_16_bits else record["bytes"])


def over_bound(record: Record, measured: Record) -> tuple[float, float, float] | None:
    """Return a step over the larger of its compute and its wire time, and the spread."""
    wire = own_wire_seconds(record, measured["candidate"])
    return ratio(measured["synchronised"], [max(each, wire) for each in measured["alone"]])


def show_ratio(value: tuple[float, float, float] | None) -> str:
    """Return a ratio and its spread for a table."""
    if value is None:
        return "-"
    return f"{value[0]:.2f} ({value[1]:.2f} to {value[2]:.2f})"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows in columns; the first row is the heading, the first column left-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def describe_machine(mpi: str) -> dict[str, Any]:
    """Return what the figures depend on: processor, cores, system, versions.

    Args:
        mpi: what MPI says about itself; its first line is kept.
    """
    return {
        "mpi": mpi.partition("\n")[0].rstrip("\0 "),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("mpiddp", "torch", "mpi4py", "numpy")},
        "commit": _commit(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def _commit() -> str:
    """Return the commit of these sources, with a `+` where files were changed since."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True)
    except OSError:
        return "unknown"
    return f"{head.stdout.strip()}{'+' if changed.returncode == 1 else ''}" or "unknown"

"""The table of public trainers, from benchmarks/results/trainers-MPI.json."""

from __future__ import annotations

import statistics

from benchmark_results import MPIS, ROOT, describe, load, markdown
from measuring import Record


def trainers() -> str:
    """Return what each trainer computed under torchrun and here, and how fast."""
    head = ["program", "change for CPUs", "MPI", "steps", "first and last loss of rank 0"]
    head += ["on Gloo", "steps a second", "on Gloo"]
    rows, sources = [head], []
    for name, mpi in MPIS.items():
        file = f"trainers-{name}"
        if (ROOT / "benchmarks" / "results" / f"{file}.json").exists():
            results = load(file)
            rows += [_row(mpi, record) for record in results["trainers"]]
            sources.append(f"- {describe(results, file)}")
    if not sources:
        return "There are no results yet."
    return f"{markdown(rows)}\n\n" + "\n".join(sources)


def _row(mpi: str, record: Record) -> list[str]:
    versions = " and ".join(f"{name} {version}" for name, version in record["packages"].items())
    return [
        f"{record['case']} ({versions})",
        record["change"] or "none",
        mpi,
        str(record["steps"]),
        _losses(record["losses"]),
        _losses(record["losses on Gloo"]),
        _speed(record["steps a second"]),
        _speed(record["steps a second on Gloo"]),
    ]


def _losses(losses: list[float]) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses)


def _speed(speeds: list[float]) -> str:
    return f"{statistics.median(speeds):.3g}" if speeds else "-"

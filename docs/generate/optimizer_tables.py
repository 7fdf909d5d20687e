"""The tables of whole steps with the optimizer, and of the largest model.

Made of benchmarks/results/optimizer-MPI.json and largest-MPI.json.
"""

from __future__ import annotations

import statistics

from benchmark_results import MPIS, ROOT, describe, load, markdown, milliseconds
from measuring import Record, ratio, show_ratio
from names import OURS, OURS_NODE


def optimizers() -> str:
    """Return a section for each MPI and number of ranks."""
    parts = []
    for name, mpi in MPIS.items():
        results = load(f"optimizer-{name}")
        records = results["optimizers"]
        for ranks in sorted({record["ranks"] for record in records}):
            of_ranks = [record for record in records if record["ranks"] == ranks]
            parts += [f"## {mpi}, {ranks} ranks", _steps(of_ranks)]
        parts += [f"Memory of a node, {mpi}:", _memory(results["optimizer_memory"])]
        parts.append(describe(results, f"optimizer-{name}"))
    return "\n\n".join(parts)


def _steps(records: list[Record]) -> str:
    rows = [["", "", "", "step, ms", "over it", "optimizer alone, ms", "over it", "to expect"]]
    ours: Record = {}
    for record in records:
        first = record["candidate"] == OURS_NODE
        if first:
            ours = record
        row = [record["model"] if first else "", record["optimizer"] if first else ""]
        row.append(record["candidate"])
        for part in ("step", "alone"):
            row.append(milliseconds(record[part]))
            row.append("" if first else show_ratio(ratio(ours[part], record[part])))
        row.append(f"{_expected(record):.2f}" if record["candidate"] == OURS else "")
        rows.append(row)
    return markdown(rows)


def _expected(record: Record) -> float:
    """Return what is left of a step if its ranks share the optimizer's work, and nothing else."""
    step, alone = (statistics.median(record[part]) for part in ("step", "alone"))
    return 1 - alone * (1 - 1 / record["ranks"]) / step


def _memory(records: list[Record]) -> str:
    rows = [["", "ranks", "", "parameters and state, MB"]]
    rows += [
        [
            f"{record['model']}, {record['optimizer']}",
            str(record["ranks"]),
            record["candidate"],
            f"{record['bytes'] / 1e6:.0f}",
        ]
        for record in records
    ]
    return markdown(rows)


def largest_model() -> str:
    """Return how large a decoder each way can train, and how fast."""
    parts = []
    for name, mpi in MPIS.items():
        file = f"largest-{name}"
        if not (ROOT / "benchmarks" / "results" / f"{file}.json").exists():
            continue
        results = load(file)
        gib = results["limit"] / 2**30
        head = [f"{mpi}, {results['ranks']} ranks", f"million parameters in {gib:g} GiB"]
        head += ["bytes a parameter", f"a step of {results['layers of all']} layers, ms"]
        rows = [
            [
                each["name"],
                f"{each['parameters'] / 1e6:.0f}",
                f"{each['bytes a parameter']:.1f}",
                milliseconds(each["seconds"]),
            ]
            for each in results["ways"]
        ]
        parts += [markdown([head, *rows]), describe(results, file)]
    return "\n\n".join(parts) or "There are no results yet."

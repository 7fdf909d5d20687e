"""The tables of training steps, made of benchmarks/results/*.json; and the table of README.md.

python docs/generate/step_tables.py      # README.md's table
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmark_results import (
    MPIS,
    ROOT,
    alone,
    candidates,
    describe,
    load,
    markdown,
    milliseconds,
)
from measuring import (
    Record,
    Samples,
    exposed,
    over_bound,
    own_wire_seconds,
    ratio,
    show_ratio,
    wire_seconds,
)
from names import (
    ALONE,
    FLATTENED,
    GLOO,
    HOOKED,
    LIMIT_ALONE,
    NAMES,
    ONE_EACH,
    OUR_BACKEND,
    OURS,
    OURS_MPI,
    OURS_NODE,
)

# What the table of a step shows beside mpiddp, in this order.
BESIDE = (OURS_MPI, GLOO, OUR_BACKEND, FLATTENED, ONE_EACH, LIMIT_ALONE)

# README.md's lines: where mpiddp gains, and where it loses. Model, nodes, ranks, Gbit/s.
README_LINES = (
    ("8 x Linear(1024)", 1, 2, None),
    ("transformer", 1, 2, None),
    ("200 x Linear(64)", 1, 4, None),
    ("64 x Linear(512)", 2, 4, 1.0),
    ("transformer", 4, 4, 10.0),
    ("64 x Linear(512)", 2, 4, 10.0),
)
# And with the optimizer. Model, optimizer, ranks.
README_OPTIMIZERS = (("3 x Linear(4096)", "AdamW", 2), ("transformer", "AdamW, fused", 2))


def one_machine() -> str:
    """Return what averaging adds to a step on one machine: a table for each MPI and setting."""
    parts = []
    for name, mpi in MPIS.items():
        results = load(name)
        for ranks in sorted({record["ranks"] for record in results["exposed"]}):
            records = [record for record in results["exposed"] if record["ranks"] == ranks]
            rounds = [len(each["alone"]) for record in records for each in record["records"]]
            plot = ROOT / "benchmarks" / "results" / f"exposed-{ranks}-ranks.svg"
            for views in (True, False):
                rows = _exposed_rows(records, views)
                if len(rows) < 2:
                    continue
                parts.append(
                    f"## {mpi}, {ranks} ranks, views {'on' if views else 'off'}\n\n"
                    f"{describe(results, name)} {min(rounds)} to {max(rounds)} rounds.\n\n"
                )
                if views and name == "openmpi" and plot.exists():
                    parts.append(f"![exposed time in units of Gloo's]({plot.name})\n\n")
                parts.append(f"{markdown(rows)}\n\n")
    return "".join(parts)


def _exposed_rows(records: Iterable[Record], views: bool) -> list[list[str]]:
    rows = []
    shown: list[str] = []
    for record in records:
        measured = candidates(record, views)
        if OURS not in measured:
            continue
        shown = shown or [name for name in BESIDE if name in measured]
        ours = exposed(measured[OURS])
        cells = [_exposed_cell(measured[name], ours) if name in measured else "" for name in shown]
        rows.append(
            [record["model"], milliseconds(alone(record)), f"**{milliseconds(ours)}**", *cells]
        )
    return [["model", "step alone", OURS, *shown], *rows]


def _exposed_cell(record: Record, ours: Samples) -> str:
    theirs = exposed(record)
    value = ratio(ours, theirs)
    share = "in the noise"
    if value is not None and value[0] > 0:
        share = "{:.2f}, {:.2f} to {:.2f}".format(*value)
    return f"{milliseconds(theirs)} ({share})"


def between_hosts() -> str:
    """Return steps between hosts over their bound: tables for each MPI, and its plot.

    Two tables, with and without a hook: one would be wider than a page.
    """
    parts = []
    for name, mpi in MPIS.items():
        results = load(name)
        records = results["between_hosts"]
        found = {each for record in records for each in candidates(record, True)}
        names = [each for each in NAMES if each in found]
        plain = [each for each in names if each not in HOOKED]
        hooked = [each for each in names if each in HOOKED]
        rows = [["hosts x ranks, Gbit/s", "model", "compute, ms", "wire, ms", *plain]]
        with_hook = [["hosts x ranks, Gbit/s", "model", *hooked]]
        behind = 0
        for record in records:
            measured = candidates(record, True)
            bounds = {each: over_bound(record, measured[each]) for each in measured}
            ours, gloo = bounds[OURS], bounds[GLOO]
            behind += ours is not None and gloo is not None and ours[0] > gloo[0]
            shown = {each: show_ratio(bounds[each]) if each in bounds else "" for each in names}
            where = [_layout(record), record["model"]]
            times = [alone(record), [wire_seconds(record, record["bytes"])]]
            rows.append([*where, *map(milliseconds, times), *(shown[each] for each in plain)])
            with_hook.append([*where, *(shown[each] for each in hooked)])
        parts.append(f"## {mpi}\n\n")
        if name != "openmpi":  # whose plot is at the top of the page
            parts.append(f"![steps between hosts over their bound, {mpi}](hosts-{name}.svg)\n\n")
        parts.append(
            f"{describe(results, name)} In {behind} of {len(rows) - 1} rows mpiddp is "
            f"slower than Gloo.\n\n{markdown(rows)}\n\n"
            f"With a hook that sends 16 bits:\n\n{markdown(with_hook)}\n\n"
            f"Bytes over those of float32, and core time for a second of wire:\n\n"
            f"{markdown(_costs(records, names))}\n\n"
        )
    return "".join(parts)


def _layout(record: Record) -> str:
    return f"{record['nodes']} x {record['ranks'] // record['nodes']}, {record['gigabits']:g}"


def segments() -> str:
    """Return MPICH's steps with UCX's segments of TCP as they are, and larger."""
    plain, larger = load("mpich"), load("hosts-mpich-segments")
    rate = larger["between_hosts"][0]["gigabits"]
    cells = [record for record in plain["between_hosts"] if record["gigabits"] == rate]
    pairs = zip(cells, larger["between_hosts"], strict=True)
    rows = [
        ["hosts x ranks", "model", "mpiddp over Gloo", "with larger segments", "Gloo over Gloo"]
    ]
    for first, second in pairs:
        if any(first[key] != second[key] for key in ("model", "nodes", "ranks", "gigabits")):
            raise ValueError(f"{first['model']} and {second['model']}: not the same cells")
        steps = [
            {name: candidates(record, True)[name]["synchronised"] for name in (OURS, GLOO)}
            for record in (first, second)
        ]
        change = statistics.median(steps[1][GLOO]) / statistics.median(steps[0][GLOO])
        rows.append(
            [
                f"{first['nodes']} x {first['ranks'] // first['nodes']}",
                first["model"],
                *(show_ratio(ratio(each[OURS], each[GLOO])) for each in steps),
                f"{change:.2f}",
            ]
        )
    variables = ", ".join(f"`{name}={value}`" for name, value in larger["variables"].items())
    return (
        f"{describe(larger, 'hosts-mpich-segments')} Links of {rate:g} Gbit/s, float32, whole "
        f"steps. Larger segments: {variables}.\n\n{markdown(rows)}\n\n"
    )


def _costs(records: Iterable[Record], names: list[str]) -> list[list[str]]:
    """Return what each step costs besides time."""
    rows = [["hosts x ranks, Gbit/s", "model", *names]]
    for record in records:
        measured = candidates(record, True)
        cells = []
        for name in names:
            if name not in measured:
                cells.append("")
                continue
            each = measured[name]
            sent = statistics.median(each["sent"]) / (4 * record["elements"])
            cores = zip(each["core"], each["core_alone"], strict=True)
            core = statistics.median(busy - alone for busy, alone in cores)
            cells.append(f"{sent:.2f}, {core / own_wire_seconds(record, name):.2f}")
        rows.append([_layout(record), record["model"], *cells])
    return rows


def readme() -> str:
    """Return README.md's table: whole steps, where mpiddp gains and where it loses."""
    results = load("openmpi")
    rows = [["model", "ranks", "step alone", "mpiddp", "DDP on Gloo", "mpiddp over Gloo (90 %)"]]
    for line in README_LINES:
        _, nodes, ranks, rate = line
        (record,) = (
            each
            for each in results["exposed" if rate is None else "between_hosts"]
            if (each["model"], each["nodes"], each["ranks"], each.get("gigabits")) == line
        )
        measured = candidates(record, True)
        ours, theirs = measured[OURS]["synchronised"], measured[GLOO]["synchronised"]
        where = f"{ranks} on one host"
        if rate is not None:
            where = f"{nodes} hosts x {ranks // nodes}, {rate:g} Gbit/s"
        seconds = (alone(record), ours, theirs)
        times = [f"{1e3 * statistics.median(each):.0f} ms" for each in seconds]
        rows.append([record["model"], where, *times, show_ratio(ratio(ours, theirs))])
    return markdown([*rows, *_readme_optimizers()])


def _readme_optimizers() -> list[list[str]]:
    """Return the rows of NodeOptimizer, whose steps have the optimizer's step in them."""
    every = load("optimizer-openmpi")["optimizers"]
    rows = []
    for line in README_OPTIMIZERS:
        steps = {
            each["candidate"]: each["step"]
            for each in every
            if (each["model"], each["optimizer"], each["ranks"]) == line
        }
        model, optimizer, ranks = line
        rows.append(
            [
                f"{model}, {optimizer}, NodeOptimizer",
                f"{ranks} on one host",
                *(
                    f"{1e3 * statistics.median(steps[name]):.0f} ms"
                    for name in (ALONE, OURS_NODE, GLOO)
                ),
                show_ratio(ratio(steps[OURS_NODE], steps[GLOO])),
            ]
        )
    return rows


if __name__ == "__main__":
    print(readme())

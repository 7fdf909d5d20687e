"""The tables of one measurement each: bucket, memory, starts, snapshots, of benchmarks/results/."""

from __future__ import annotations

import statistics

from benchmark_results import MPIS, describe, load, markdown, show_bytes
from measuring import Record, Samples, ratio, show_ratio
from names import GLOO, LIMIT_IN_PLACE, OURS


def sources() -> str:
    """Return what the figures depend on."""
    return "".join(f"- {describe(load(name), name)}\n" for name in MPIS)


def one_bucket() -> str:
    """Return the mean of one full bucket, beside the MPI's own all-reduce."""
    head = ["", "bucket", f"{OURS}, ms", "over the best all-reduce of the MPI", "over the limit"]
    return markdown([head, *(_bucket_row(mpi, record) for mpi, record in _records("one_bucket"))])


def _records(part: str) -> list[tuple[str, Record]]:
    return [(mpi, record) for name, mpi in MPIS.items() for record in load(name).get(part, ())]


def _bucket_row(mpi: str, record: Record) -> list[str]:
    seconds = record["seconds"]
    calls = [name for name in seconds if "llreduce" in name]
    best = min(calls, key=lambda name: statistics.median(seconds[name]))
    return [
        f"{mpi}, {record['ranks']} ranks",
        show_bytes(record["bytes"]),
        _milliseconds(seconds[OURS]),
        f"{show_ratio(ratio(seconds[OURS], seconds[best]))}, {best}",
        show_ratio(ratio(seconds[OURS], seconds[LIMIT_IN_PLACE])),
    ]


def memory() -> str:
    """Return the memory that a rank takes beside its parameters."""
    rows = [["", "", "views", "gradients, MB", "after 5 steps", "after 45 steps"]]
    rows += [
        [
            f"{mpi}, {record['ranks']} ranks",
            record["candidate"],
            "on" if record["views"] else "off",
            f"{record['bytes'] / 1e6:.0f}",
            f"{record['soon']:.2f}",
            f"{record['later']:.2f}",
        ]
        for mpi, record in _records("memory")
    ]
    return markdown(rows)


def starts() -> str:
    """Return what a rank takes until its first step, beside torchrun with Gloo."""
    head = ["ranks", "until the first step, s", f"{GLOO}, s", "processor time a rank, s", GLOO]
    rows = [[*head, "ratio"]]
    for record in load("start-openmpi")["start"]:
        samples = record["records"]
        seconds = [f"{statistics.median(samples[name]['seconds']):.1f}" for name in (OURS, GLOO)]
        processor = [samples[name]["processor"] for name in (OURS, GLOO)]
        rows.append(
            [
                str(record["ranks"]),
                *seconds,
                *(f"{statistics.median(each):.2f}" for each in processor),
                show_ratio(ratio(*processor)),
            ]
        )
    return markdown(rows)


def start_calls() -> str:
    """Return the system calls of a start that name a file."""
    calls = load("start-openmpi")["calls"]
    totals = {name: sum(calls[name].values()) for name in (OURS, GLOO)}
    words = [f"{totals[name]:,} with {name}" for name in (OURS, GLOO)]
    return f"{' and '.join(words)} ({totals[OURS] / totals[GLOO]:.2f})"


def lazy_buckets() -> str:
    """Return the memory of a step with and without `lazy_bucket_allocation`."""
    results = load("lazy-openmpi")
    rows = [["", "lazy", "views", "highest in a step", "after forward"]]
    for record in results["lazy"]:
        switches = ["on" if record[name] else "off" for name in ("lazy", "views")]
        figures = [f"{record[name]:.2f}" for name in ("highest", "forward")]
        rows.append([record["candidate"], *switches, *figures])
    return f"{markdown(rows)}\n\n{describe(results, 'lazy-openmpi')}"


def construction() -> str:
    """Return what a start and the construction of a model take."""
    rows = [["", "", f"{OURS}, ms", f"{GLOO}, ms", "mpiddp over Gloo (90 %)"]]
    rows += [
        [
            f"{mpi}, {record['ranks']} ranks",
            what,
            _milliseconds(seconds[OURS]),
            _milliseconds(seconds[GLOO]),
            show_ratio(ratio(seconds[OURS], seconds[GLOO])),
        ]
        for mpi, record in _records("construction")
        for what, seconds in record["seconds"].items()
    ]
    return markdown(rows)


def snapshots() -> str:
    """Return what snapshots in the memory of the node add to a step."""
    rows = [["", "state", "ms a step", "ms a snapshot", "s between two", "of the time"]]
    sources = []
    for kind, file in (("replicas", "snapshots"), ("shards", "snapshots-sharded")):
        for name, mpi in MPIS.items():
            found = load(f"{file}-{name}")
            rows.append(
                [
                    f"{mpi}, {found['ranks']} ranks",
                    f"{kind}, {found['state_megabytes']:.0f} MB",
                    f"{1e3 * found['seconds_a_step']:.0f}",
                    f"{1e3 * found['seconds_of_one']:.0f}",
                    f"{found['seconds_between']:.1f}",
                    f"{found['share']:.1%}",
                ]
            )
            sources.append(f"- {describe(found, f'{file}-{name}')}")
    return f"{markdown(rows)}\n\n" + "\n".join(sources)


def _milliseconds(seconds: Samples) -> str:
    return f"{1e3 * statistics.median(seconds):.3g}"

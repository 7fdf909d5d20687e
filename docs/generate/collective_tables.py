"""The tables of the collectives of torch.distributed, made of benchmarks/results/."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial

from benchmark_results import MPIS, describe, load, markdown, show_bytes
from divided_steps import FAKE, added_to
from goals import LARGE
from measuring import Record, Samples, quartiles, ratio, show_ratio
from names import BARE, BLOCKING, GLOO_GROUP, MESSAGES, OURS

# A collective, a size and a number of ranks.
Cell = tuple[str, int, int]

_HOSTS_HEAD = ("mpiddp ms", "over MPI's calls", "over MPI's blocking call", "over Gloo")


def tables() -> str:
    """Return what was measured, and a table for each size."""
    sources = {name: load(f"collectives-{name}") for name in MPIS}
    cells: dict[str, dict[Cell, Record]] = {
        name: {(r["collective"], r["bytes"], r["ranks"]): r for r in results["collectives"]}
        for name, results in sources.items()
    }
    parts = [f"- {describe(results, f'collectives-{n}')}\n" for n, results in sources.items()]
    parts.append(_beside_gloo(cells))
    for size in sorted({size for each in cells.values() for _, size, _ in each if size > 0}):
        if size < LARGE:
            title = f"{show_bytes(size)}: microseconds more than the bare call"
            parts.append(_table(title, cells, size, _microseconds))
            continue
        for other, called in ((BARE, "the bare call"), (GLOO_GROUP, "Gloo")):
            title = f"{show_bytes(size)}: mpiddp's time over that of {called}"
            parts.append(_table(title, cells, size, partial(_share, other)))
    return "".join(parts)


def _table(
    title: str,
    cells: Mapping[str, Mapping[Cell, Record]],
    size: int,
    show: Callable[[Record], str],
) -> str:
    setups = [
        (name, ranks)
        for name, each in cells.items()
        for ranks in sorted({ranks for _, _, ranks in each})
    ]
    rows = [["", *(f"{MPIS[name]}, {ranks} ranks" for name, ranks in setups)]]
    for collective in dict.fromkeys(each for cell in cells.values() for each, _, _ in cell):
        records = [cells[name].get((collective, size, ranks)) for name, ranks in setups]
        if any(records):
            shown = ["" if record is None else show(record) for record in records]
            rows.append([collective, *shown])
    return f"\n## {title}\n\n{markdown(rows)}\n"


def _microseconds(record: Record) -> str:
    pairs = zip(record["seconds"][OURS], record["seconds"][BARE], strict=True)
    return f"{quartiles([1e6 * (ours - bare) for ours, bare in pairs])[1]:.0f}"


def _share(other: str, record: Record) -> str:
    value = ratio(record["seconds"][OURS], record["seconds"][other])
    return "-" if value is None else f"{value[0]:.2f}"


def _beside_gloo(cells: Mapping[str, Mapping[Cell, Record]]) -> str:
    shares = [
        value[0]
        for each in cells.values()
        for record in each.values()
        if (value := ratio(record["seconds"][OURS], record["seconds"][GLOO_GROUP])) is not None
    ]
    slower = sum(share > 1 for share in shares)
    return (
        f"\nOver all {len(shares)} cells the median of mpiddp's time over Gloo's is "
        f"{statistics.median(shares):.2f}. In {slower} of them mpiddp is slower.\n"
    )


def ways() -> str:
    """Return where MPI's calls and messages are faster than the way that the table chooses."""
    rows = [["", "cells", "mpiddp over messages (median)", "messages are faster by over 10 %"]]
    for name, mpi in MPIS.items():
        records = load(f"collectives-{name}")["collectives"]
        for ranks in sorted({record["ranks"] for record in records}):
            shares = {
                f"{record['collective']} {show_bytes(record['bytes'])}".strip(): value
                for record in records
                if record["ranks"] == ranks
                and MESSAGES in record["seconds"]
                and (value := ratio(record["seconds"][OURS], record["seconds"][MESSAGES]))
            }
            if shares:
                middle = statistics.median(share[0] for share in shares.values())
                worse = [
                    f"{cell} {share[0]:.2f}" for cell, share in shares.items() if share[1] > 1.1
                ]
                row = [str(len(shares)), f"{middle:.2f}", ", ".join(worse) or "none"]
                rows.append([f"{mpi}, {ranks} ranks", *row])
    return markdown(rows)


def between_hosts() -> str:
    """Return a table of collectives on several hosts, for each MPI."""
    parts = []
    for name, mpi in MPIS.items():
        results = load(f"collectives-hosts-{name}")
        rows = [[mpi, "size", *_HOSTS_HEAD]]
        for setup in results["between_hosts"]:
            for record in setup["collectives"]:
                seconds = record["seconds"]
                where = f"{setup['hosts']} x {setup['ranks_each']}, {setup['rate']}"
                rows.append(
                    [f"{record['collective']}, {where}", show_bytes(record["bytes"])]
                    + [f"{1e3 * statistics.median(seconds[OURS]):.1f}"]
                    + [_share(other, record) for other in (MESSAGES, BLOCKING, GLOO_GROUP)]
                )
        parts += [markdown(rows), describe(results, f"collectives-hosts-{name}")]
    return "\n\n".join(parts)


def overlap() -> str:
    """Return the table of an all-reduce beside a matrix product."""
    records = [
        (name, record) for name in MPIS for record in load(f"collectives-{name}").get("overlap", ())
    ]
    names = list(dict.fromkeys(each for _, record in records for each in record["seconds"]))
    rows = [["", *names]]
    for name, record in records:
        shown = [_both_over_sum(record["seconds"].get(each)) for each in names]
        rows.append([f"{MPIS[name]}, {record['ranks']} ranks", *shown])
    return markdown(rows)


def divided() -> str:
    """Return a table of steps of models that are divided over the ranks, for each MPI."""
    parts = []
    for name, mpi in MPIS.items():
        results = load(f"divided-{name}")
        ranks = results["divided"][0]["ranks"]
        head = [f"{mpi}, {ranks} ranks", f"on {FAKE}", "mpiddp adds", "Gloo adds"]
        rows = [[*head, "mpiddp's over Gloo's", f"a step over that on {FAKE}"]]
        rows += [[record["case"], *added_to(record["seconds"])] for record in results["divided"]]
        parts += [markdown(rows), describe(results, f"divided-{name}")]
    return "\n\n".join(parts)


def _both_over_sum(parts: Mapping[str, Samples] | None) -> str:
    if parts is None:
        return ""
    # The order in which benchmarks/overlap.py writes them.
    alone, compute, both = parts.values()
    return show_ratio(ratio(both, [sum(pair) for pair in zip(alone, compute, strict=True)]))

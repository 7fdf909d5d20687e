"""Measure each collective of torch.distributed beside Gloo and beside the MPI call that it wraps.

    mpirun -n 2 python benchmarks/collectives.py [--seconds S] [--sizes BYTES...] [--json FILE]

mpiddp's process group, one that leaves everything to MPI, a group on Gloo, the bare mpi4py call
(nonblocking, then Wait) and, for information, MPI's blocking call take turns on the same tensors of
float32; all must give the same result. Calls are synchronous. The time of a call is that of the
slowest rank.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from collective_calls import BARRIER, COLLECTIVES, Call, Sizes
from goals import COLLECTIVE_DIFFERENCE, LARGE, collective_verdict
from measuring import Record, describe_machine, quartiles, ratio, show_ratio, table
from mpi4py import MPI
from names import BARE, BLOCKING, GLOO_GROUP, MESSAGES, OURS

import mpiddp

SIZES = (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20)
BLOCK_SECONDS = 0.015
ROUNDS = (3, 25)  # at least, whatever the time; at most

COMM = MPI.COMM_WORLD

COLLECTIVES_SETTING = "MPIDDP_COLLECTIVES"

# Set in the Makefile: MPI's own environment, so not in capitals.
YIELDING = "OMPI_MCA_mpi_yield_when_idle"


def block(call: Call, times: int) -> float:
    """Return the seconds of a call in a block of some, on the slowest rank. Collective."""
    if times > 1:
        call()
    COMM.Barrier()
    began = time.perf_counter()
    for _ in range(times):
        call()
    seconds = (time.perf_counter() - began) / times
    return float(COMM.allreduce(seconds, MPI.MAX))


def measure(calls: dict[str, Call], limit: float) -> dict[str, list[float]]:
    """Return the seconds of each call in each round, of about `limit` in all. Collective."""
    began = time.monotonic()
    times = {}
    for name, call in calls.items():
        once = block(call, 1)
        if once < BLOCK_SECONDS:
            once = min(once, block(call, 2))
        times[name] = max(1, min(500, math.ceil(BLOCK_SECONDS / once)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(1).shuffle
    for done in range(ROUNDS[1]):
        # One clock decides for all ranks.
        if COMM.bcast(done >= ROUNDS[0] and time.monotonic() - began > limit):
            break
        shuffle(order)
        for name in order:
            seconds[name].append(block(calls[name], times[name]))
    return seconds


def messages_only() -> dist.ProcessGroup | None:
    """Return a group of all ranks that leaves everything to MPI. Collective."""
    before = os.environ.get(COLLECTIVES_SETTING)
    os.environ[COLLECTIVES_SETTING] = "messages"
    try:
        return dist.new_group()
    finally:
        del os.environ[COLLECTIVES_SETTING]
        if before is not None:
            os.environ[COLLECTIVES_SETTING] = before


def measure_all(names: Sequence[str], sizes: Sequence[int], limit: float) -> list[Record]:
    """Return a record for each collective and size, within about `limit` seconds. Collective."""
    groups = {
        OURS: dist.group.WORLD,
        MESSAGES: messages_only(),
        GLOO_GROUP: dist.new_group(backend="gloo"),
    }
    cells = [
        (name, size) for size in sizes for name in names if name != BARRIER or size == sizes[0]
    ]
    records = []
    ends = time.monotonic() + limit
    for index, (name, size) in enumerate(cells):
        case = COLLECTIVES[name](Sizes(size, COMM), groups)
        case.check()
        share = max(0.0, ends - time.monotonic()) / (len(cells) - index)
        seconds = measure(case.calls, share)
        nbytes = 0 if name == BARRIER else size
        records.append(
            {"collective": name, "bytes": nbytes, "ranks": COMM.size, "seconds": seconds}
        )
    return records


def show_bytes(size: int) -> str:
    """Return a size for a table."""
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B" if size else ""


def report(records: list[Record], mpi: str) -> str:
    """Return the table of all records."""
    shown = (OURS, MESSAGES, BARE, BLOCKING, GLOO_GROUP)
    head = [f"synchronous calls, {COMM.size} ranks, us", "size", *shown]
    head += ["mpiddp - bare (quartiles)"]
    head += [f"mpiddp / {other} (90 %)" for other in (BARE, GLOO_GROUP, MESSAGES)] + ["missed"]
    rows = [head]
    last = None
    # By collective, as people look them up; measured by size.
    for record in sorted(records, key=lambda each: list(COLLECTIVES).index(each["collective"])):
        name, seconds = record["collective"], record["seconds"]
        micro = {each: [1e6 * sample for sample in seconds[each]] for each in seconds}
        row = ["" if name == last else name, show_bytes(record["bytes"])]
        row += [f"{quartiles(micro[each])[1]:.1f}" for each in shown]
        pairs = zip(micro[OURS], micro[BARE], strict=True)
        low, middle, high = quartiles([ours - bare for ours, bare in pairs])
        row.append(f"{middle:.1f} ({low:.1f} to {high:.1f})")
        others = (BARE, GLOO_GROUP, MESSAGES)
        row += [show_ratio(ratio(seconds[OURS], seconds[each])) for each in others]
        rows.append([*row, collective_verdict(record)])
        last = name
    waits = "polls without giving its core away"
    if mpi.startswith("Open MPI") and os.environ.get(YIELDING) == "1":
        waits = "yields its core between polls (mpi_yield_when_idle)"
    note = (
        f"{BARE}: the nonblocking MPI call and Wait, in place where torch's is; blocking: MPI's "
        f"blocking call. MPI's wait {waits}; {len(os.sched_getaffinity(0))} cores.\n"
        f"{MESSAGES}: mpiddp where it leaves everything to MPI.\n"
        f"Missed: over {COLLECTIVE_DIFFERENCE:g} us more than bare below {show_bytes(LARGE)}, over "
        f"1.10 times bare from there on, slower than Gloo, over 1.10 times {MESSAGES}, where "
        f"mpiddp/collectives/way_table.py is wrong; with a ? where the spread does not say."
    )
    return f"{table(rows)}\n{note}"


def main() -> None:
    """Measure and print a table on rank 0. Collective."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=290, help="for all, about (%(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--collectives", nargs="+", default=list(COLLECTIVES), choices=COLLECTIVES)
    parser.add_argument("--json", metavar="FILE", help="write samples, machine and versions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mpiddp.init_process_group()
    records = measure_all(args.collectives, args.sizes, args.seconds)
    mpiddp.destroy_process_group()
    if COMM.rank == 0:
        mpi = MPI.Get_library_version()
        print(report(records, mpi), end="\n\n", flush=True)
        if args.json:
            result: dict[str, Any] = {"machine": describe_machine(mpi), "collectives": records}
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()

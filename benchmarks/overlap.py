"""Measure how much of an all-reduce hides behind a computation.

    mpirun -n 2 python benchmarks/overlap.py [--mb 25] [--json FILE]

An all-reduce with async_op=True, a matrix product that takes as long, then wait: against the
all-reduce (started and waited for) and the product, one after the other. mpiddp's group, a group on
Gloo and MPI's nonblocking call take turns. The time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from collectives import COMM, block
from measuring import Record, describe_machine, quartiles, ratio, show_ratio, table
from mpi4py import MPI
from names import BARE, GLOO_GROUP, OURS

import mpiddp

WIDTH = 192
ALONE, COMPUTE, BOTH = "all-reduce", "product", "both"

# Begins an all-reduce; what it returns waits for its end.
Start = Callable[[], Callable[[], object]]


def starts(tensor: torch.Tensor) -> dict[str, Start]:
    """Return what is compared. Collective."""
    memory = tensor.numpy()
    gloo: Any = dist.new_group(backend="gloo")

    def through_torch(group: Any) -> Start:
        def start() -> Callable[[], object]:
            work: Any = dist.all_reduce(tensor, group=group, async_op=True)
            return work.wait  # type: ignore[no-any-return]

        return start

    return {
        OURS: through_torch(None),
        GLOO_GROUP: through_torch(gloo),
        BARE: lambda: COMM.Iallreduce(MPI.IN_PLACE, memory).Wait,
    }


def measure(nbytes: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return for each candidate the seconds of each part in each round. Collective."""
    candidates = starts(torch.zeros(nbytes // 4))
    left, right, result = (torch.zeros(WIDTH, WIDTH) for _ in range(3))

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right, out=result)

    times = {}
    for name, start in candidates.items():
        # The first two bring in memory; the median of the rest decides.
        alone = [block(lambda start=start: start()(), 1) for _ in range(7)]  # type: ignore[misc]
        product = quartiles([block(lambda: compute(20), 1) / 20 for _ in range(5)])[1]
        times[name] = max(1, round(quartiles(alone[2:])[1] / product))

    def both(name: str) -> None:
        wait = candidates[name]()
        compute(times[name])
        wait()

    seconds: dict[str, dict[str, list[float]]] = {
        name: {ALONE: [], COMPUTE: [], BOTH: []} for name in candidates
    }
    turns: list[tuple[str, str, Callable[[], object]]] = []
    for name, start in candidates.items():
        turns.append((name, ALONE, lambda start=start: start()()))  # type: ignore[misc]
        turns.append((name, COMPUTE, lambda name=name: compute(times[name])))  # type: ignore[misc]
        turns.append((name, BOTH, lambda name=name: both(name)))  # type: ignore[misc]
    shuffle = random.Random(1).shuffle
    for _ in range(rounds):
        shuffle(turns)
        for name, part, call in turns:
            seconds[name][part].append(block(call, 1))
    return seconds


def report(record: Record) -> str:
    """Return the table."""
    title = f"async all_reduce of {record['bytes'] >> 20} MB, {record['ranks']} ranks, ms"
    rows = [[title, ALONE, COMPUTE, BOTH, "both / sum (90 %)"]]
    for name, parts in record["seconds"].items():
        row = [f"{1e3 * quartiles(parts[part])[1]:.1f}" for part in (ALONE, COMPUTE, BOTH)]
        one_by_one = [sum(pair) for pair in zip(parts[ALONE], parts[COMPUTE], strict=True)]
        rows.append([name, *row, show_ratio(ratio(parts[BOTH], one_by_one))])
    return table(rows)


def main() -> None:
    """Measure and print a table on rank 0. Collective."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=25, help="megabytes of float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="write samples, machine and versions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mpiddp.init_process_group()
    seconds = measure(args.mb << 20, args.rounds)
    mpiddp.destroy_process_group()
    if COMM.rank == 0:
        record = {"bytes": args.mb << 20, "ranks": COMM.size, "seconds": seconds}
        print(report(record), end="\n\n", flush=True)
        if args.json:
            machine = describe_machine(MPI.Get_library_version())
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump({"machine": machine, "overlap": [record]}, file, indent=1)


if __name__ == "__main__":
    main()

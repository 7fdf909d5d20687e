"""Measure what snapshots in node memory add to a training step.

    mpirun -n 2 python benchmarks/snapshots.py [--seconds 20] [--rounds 4] [--json FILE]

Blocks of steps with snapshots and without take turns, in one run with one model. A block is long
beside the time between two snapshots, and what counts is its mean: most steps have no snapshot in
them. All is in it: copying the state in a step, and writing it in a thread beside the next ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import describe_machine, table
from mpi4py import MPI
from workloads import MODELS

import mpiddp
from mpiddp.checkpoint import Snapshots

MODEL = "8 x Linear(1024)"
# The goal of the project, and the default of Snapshots.
SHARE = 0.035


def block(take_step: Any, snapshots: Snapshots | None, state: Any, seconds: float) -> list[float]:
    """Train for a while; return the seconds a step, and how many snapshots began. Collective."""
    MPI.COMM_WORLD.Barrier()
    count, made = 0, 0
    began = time.monotonic()
    over = torch.zeros(1)
    while not over:
        take_step()
        count += 1
        if snapshots is not None:
            made += snapshots.step(state, count)
        if count % 10 == 0:  # all ranks stop at one step
            over.fill_(time.monotonic() - began > seconds)
            dist.broadcast(over, src=0)
    return [(time.monotonic() - began) / count, made]


def main() -> None:
    """Measure, and print a table. Collective."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of one block")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    mpiddp.init_process_group()
    torch.manual_seed(0)
    model, inputs = MODELS[MODEL].make()
    wrapped = mpiddp.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)

    def take_step() -> None:
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()

    def state() -> dict[str, Any]:
        return {"model": wrapped.module.state_dict(), "optimizer": optimizer.state_dict()}

    for _ in range(10):
        take_step()
    rounds = []
    snapshots = Snapshots(f"benchmark-{MPI.COMM_WORLD.bcast(time.time_ns())}", share=SHARE)
    try:
        for number in range(arguments.rounds):
            pair: dict[bool, list[float]] = {}
            for with_them in (True, False) if number % 2 else (False, True):
                given = snapshots if with_them else None
                pair[with_them] = block(take_step, given, state, arguments.seconds)
            rounds.append(pair)
    finally:
        snapshots.clear()
    shares = [pair[True][0] / pair[False][0] - 1 for pair in rounds]
    if dist.get_rank() == 0:
        result = {
            "machine": describe_machine(MPI.Get_library_version()),
            "ranks": dist.get_world_size(),
            "model": MODEL,
            "state_megabytes": sum(
                3 * parameter.nbytes / 1e6 for parameter in wrapped.parameters()
            ),
            "share_asked_for": SHARE,
            "rounds": [
                {"without": pair[False][0], "with": pair[True][0], "snapshots": pair[True][1]}
                for pair in rounds
            ],
            "share": statistics.median(shares),
        }
        rows = [["ms a step without", "with", "snapshots", "share"]]
        rows += [
            [f"{p[False][0] * 1e3:.2f}", f"{p[True][0] * 1e3:.2f}", str(p[True][1]), f"{s:+.1%}"]
            for p, s in zip(rounds, shares, strict=True)
        ]
        print(table(rows))
        print(f"median {result['share']:+.1%} of a step, asked for at most {SHARE:.1%}")
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

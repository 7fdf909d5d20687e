"""Measure what snapshots in node memory add to a training step.

    mpirun -n 2 python benchmarks/snapshots.py [--sharded] [--rounds 30] [--json FILE]

First a while of training in which `Snapshots` chooses when: how long it waits from one to the next.
Then short blocks of as many steps with one snapshot and with none take turns, in one run with one
model: the median of the differences is what one snapshot costs, all of it: copying the state in a
step, and writing it in a thread beside the next ones. The machine's speed drifts by more than that
between longer blocks. Snapshots of a sharded model (FSDP2) choose their steps themselves: there a
block has as many as they choose if they may take all the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measuring import describe_machine, table
from mpi4py import MPI
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from workloads import MODELS

import mpiddp
from mpiddp.checkpoint import Snapshots

MODEL = "8 x Linear(1024)"
# The goal of the project, and the default of Snapshots.
SHARE = 0.035
# In a block; writing has ended before.
STEPS = 20


class Block(NamedTuple):
    """What STEPS steps took, and how many snapshots they had."""

    seconds: float
    made: int


def interval(take_step: Any, snapshots: Snapshots, state: Any, seconds: float) -> list[float]:
    """Train for a while; return the seconds between the snapshots that began. Collective."""
    began = time.monotonic()
    times = []
    over = torch.zeros(1)
    count = 0
    while not over:
        take_step()
        count += 1
        if snapshots.step(state, count):
            times.append(time.monotonic())
        over.fill_(time.monotonic() - began > seconds)
        dist.broadcast(over, src=0)  # all ranks stop at one step
    return [later - earlier for earlier, later in pairwise(times)]


def block(take_step: Any, snapshots: Snapshots | None, state: Any, sharded: bool) -> Block:
    """Take STEPS steps, with snapshots or without. Collective."""
    MPI.COMM_WORLD.Barrier()
    made = 0
    began = time.monotonic()
    for number in range(STEPS):
        take_step()
        if snapshots is not None and (sharded or number == 0):
            made += snapshots.step(state, number)
    if snapshots is not None and sharded:
        snapshots.wait()
    seconds = time.monotonic() - began
    if snapshots is not None and dist.get_rank() == 0:
        assert made, "the last one is not written yet: STEPS is too small"
    return Block(seconds, made)


def main() -> None:
    """Measure, and print a table. Collective."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="of the first part")
    parser.add_argument("--rounds", type=int, default=30, help="pairs of blocks")
    parser.add_argument("--sharded", action="store_true", help="a model sharded by FSDP2")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    mpiddp.init_process_group()
    torch.manual_seed(0)
    model, inputs = MODELS[MODEL].make()
    if arguments.sharded:
        assert dist.group.WORLD is not None
        wrapped: Any = fully_shard(model, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    else:
        wrapped = mpiddp.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)

    def take_step() -> None:
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()

    def state() -> dict[str, Any]:
        if arguments.sharded:
            return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        return {"model": wrapped.module.state_dict(), "optimizer": optimizer.state_dict()}

    for _ in range(10):
        take_step()
    name = f"benchmark-{MPI.COMM_WORLD.bcast(time.time_ns())}"
    chosen, forced = Snapshots(name, share=SHARE), Snapshots(name, share=1.0)
    rounds = []
    try:
        gaps = interval(take_step, chosen, state, arguments.seconds)
        chosen.wait()
        for number in range(arguments.rounds):
            pair: dict[bool, Block] = {}
            for with_one in (True, False) if number % 2 else (False, True):
                snapshots = forced if with_one else None
                pair[with_one] = block(take_step, snapshots, state, arguments.sharded)
            rounds.append(pair)
    finally:
        forced.clear()
        chosen.clear()
    if dist.get_rank() == 0:
        cost = statistics.median(
            (pair[True].seconds - pair[False].seconds) / pair[True].made for pair in rounds
        )
        step = statistics.median(pair[False].seconds for pair in rounds) / STEPS
        result = {
            "machine": describe_machine(MPI.Get_library_version()),
            "ranks": dist.get_world_size(),
            "model": MODEL,
            "sharded": arguments.sharded,
            "state_megabytes": sum(
                3 * parameter.nbytes / 1e6 for parameter in wrapped.parameters()
            ),
            "share_asked_for": SHARE,
            "seconds_between": statistics.median(gaps),
            "seconds_a_step": step,
            "seconds_of_one": cost,
            "share": cost / statistics.median(gaps),
            "rounds": [
                {
                    "without": pair[False].seconds,
                    "with": pair[True].seconds,
                    "snapshots": pair[True].made,
                }
                for pair in rounds
            ],
        }
        print(
            table(
                [
                    ["ms a step", "ms a snapshot", "s between two", "share", "asked for at most"],
                    [
                        f"{step * 1e3:.1f}",
                        f"{cost * 1e3:.0f}",
                        f"{result['seconds_between']:.1f}",
                        f"{result['share']:.1%}",
                        f"{SHARE:.1%}",
                    ],
                ]
            )
        )
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

"""Measure steps whose bucket size was measured (bucket_cap_mb="auto") beside those of the default.

    mpirun -n 2 python benchmarks/bucket_tuning.py [--rounds 40] [--transport auto exchange]
        [--json FILE] [NAME ...]

First both train until the search is over. Then they take turns of a few steps each, in an order
drawn anew; a step's time is that of the slowest rank. What matters is the ratio: it must not be
more than 1.03. Equal models in one process may differ by themselves, by where their memory lies: so
there is a second one with the default, and its ratio says how much of the other means nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from pathlib import Path

import torch
from measuring import Record, describe_machine, quartiles, ratio, show_ratio, table
from mpi4py import MPI
from names import OURS
from torch import nn
from workloads import MODELS, MODELS_BETWEEN_HOSTS

import mpiddp
from mpiddp import DistributedDataParallel
from mpiddp.ddp.bucket_tuning import MOST_STEPS

COMM = MPI.COMM_WORLD
TUNED = "auto"
AGAIN = "default again"
STEPS_OF_A_TURN = 3
WORKLOADS = {**MODELS, **MODELS_BETWEEN_HOSTS}


def steps(model: nn.Module, inputs: torch.Tensor, number: int) -> list[float]:
    """Return the seconds of each of so many steps on the slowest rank. Collective."""
    times = []
    for _ in range(number):
        COMM.Barrier()
        began = time.perf_counter()
        model.zero_grad()
        model(inputs).float().square().mean().backward()
        times.append(time.perf_counter() - began)
    return [max(each) for each in zip(*COMM.allgather(times), strict=True)]


def measure(name: str, transport: str, rounds: int) -> Record:
    """Return the samples of one model, and what was chosen. Collective."""
    generator = random.Random(1)
    models, inputs = {}, {}
    for each, cap in ((OURS, None), (AGAIN, None), (TUNED, "auto")):
        torch.manual_seed(1)
        module, inputs[each] = WORKLOADS[name].make()
        models[each] = DistributedDataParallel(module, bucket_cap_mb=cap, transport=transport)
        steps(models[each], inputs[each], MOST_STEPS + 5)
    facts = models[TUNED].reducer.tuning.facts()
    seconds: dict[str, list[float]] = {each: [] for each in models}
    for _ in range(rounds):
        for each in generator.sample(list(models), len(models)):
            taken = steps(models[each], inputs[each], STEPS_OF_A_TURN)
            seconds[each].append(statistics.median(taken))
    return {
        "model": name,
        "transport": transport,
        "ranks": COMM.size,
        "seconds": seconds,
        "tuning": facts,
    }


def report(records: list[Record]) -> str:
    """Return a table of what was measured."""
    heading = "model, transport, default MiB, chosen, steps, ms of default, again, auto / default"
    rows = [heading.split(", ")]
    for record in records:
        tuning, seconds = record["tuning"], record["seconds"]
        _, middle, _ = quartiles(seconds[OURS])
        rows.append(
            [
                record["model"],
                record["transport"],
                f"{tuning['default_mb']:g}",
                f"{tuning['bucket_cap_mb']:g}",
                str(tuning["steps"]),
                f"{middle * 1e3:.2f}",
                show_ratio(ratio(seconds[AGAIN], seconds[OURS])),
                show_ratio(ratio(seconds[TUNED], seconds[OURS])),
            ]
        )
    return table(rows)


def main() -> None:
    """Measure and print a table on rank 0. Collective."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="(%(default)s)")
    parser.add_argument("--transport", nargs="+", default=["auto", "exchange"])
    parser.add_argument("--json", metavar="FILE", help="write samples, machine and versions")
    parser.add_argument("names", nargs="*", help="of models; none: four")
    args = parser.parse_args()
    torch.set_num_threads(1)
    mpiddp.init_process_group()
    names = args.names or list(MODELS)[:4]
    records = []
    for name, transport in itertools.product(names, args.transport):
        records.append(measure(name, transport, args.rounds))
        if COMM.rank == 0:  # a run of minutes may be ended before its end
            print(report(records[-1:]), flush=True)
    mpiddp.destroy_process_group()
    if COMM.rank == 0:
        print(report(records), flush=True)
        if args.json:
            machine = describe_machine(MPI.Get_library_version())
            written = {"machine": machine, "bucket_tuning": records}
            Path(args.json).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

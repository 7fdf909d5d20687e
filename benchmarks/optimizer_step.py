"""Measure whole training steps, with the optimizer: one step a node beside one step a rank.

    mpirun -n 2 python benchmarks/optimizer_step.py [--models NAME ...] [--json FILE]

"step" is forward, backward and optimizer, in ms; "optimizer" is the optimizer alone, from all ranks
at its beginning to all parameters written. Candidates take turns, and a round counts what the
slowest rank took. "each rank alone" trains as many processes side by side that synchronise nothing:
what a step would take if data parallelism cost nothing. Memory is that of parameters and optimizer
state on the node: the proportional set size of all ranks, less what it was without a model and less
the gradients, which are once a rank in all candidates.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from measuring import describe_machine, ratio, show_ratio, table
from mpi4py import MPI
from names import ALONE, GLOO, GLOO_ZERO, OURS, OURS_NODE
from torch.distributed.optim import ZeroRedundancyOptimizer
from workloads import MODELS, Workload

import mpiddp

MEASURED = ("8 x Linear(1024)", "3 x Linear(4096)", "transformer", "200 x Linear(64)")
IN_MEMORY = "3 x Linear(4096)"
# At least; and the seconds of steps that are timed at once.
ROUNDS = 9
BLOCK = 0.1
CANDIDATES = (OURS_NODE, OURS, GLOO, GLOO_ZERO, ALONE)
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-4}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 1e-4, "fused": True}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}),
}


@dataclass
class Trained:
    """A candidate.

    Attributes:
        model: is called with the inputs.
        optimizer: of its parameters.
        finish: waits until all parameters are written.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], object]

    def backward(self, inputs: torch.Tensor) -> None:
        """Do all of a step that comes before the optimizer."""
        self.optimizer.zero_grad()
        self.model(inputs).float().square().mean().backward()

    def step(self, inputs: torch.Tensor) -> None:
        """Take a whole step."""
        self.backward(inputs)
        self.optimizer.step()


def make(candidate: str, optimizer: str, model: torch.nn.Module, gloo: Any) -> Trained:
    """Return a candidate that trains `model`. Collective."""
    optimizer_class, settings = OPTIMIZERS[optimizer]

    def nothing() -> None:
        pass

    if candidate == OURS_NODE:
        shared = mpiddp.DistributedDataParallel(model, shared_parameters=True)
        own = mpiddp.optim.NodeOptimizer(shared, optimizer_class, **settings)
        return Trained(shared, own, lambda: next(shared.parameters()))
    wrapped: torch.nn.Module = model
    if candidate == OURS:
        wrapped = mpiddp.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif candidate in (GLOO, GLOO_ZERO):
        torch_class = torch.nn.parallel.DistributedDataParallel
        wrapped = torch_class(model, process_group=gloo, gradient_as_bucket_view=True)
    if candidate == GLOO_ZERO:
        zero = ZeroRedundancyOptimizer(
            wrapped.parameters(), optimizer_class, process_group=gloo, **settings
        )
        return Trained(wrapped, zero, nothing)
    return Trained(wrapped, optimizer_class(wrapped.parameters(), **settings), nothing)


def slowest(seconds: float) -> float:
    """Return what the slowest rank took. Collective."""
    most: float = MPI.COMM_WORLD.allreduce(seconds, op=MPI.MAX)
    return most


def measure(
    workload: Workload, optimizer: str, seconds: float, gloo: Any
) -> dict[str, dict[str, list[float]]]:
    """Return the samples of each candidate, in seconds. Collective."""
    torch.manual_seed(0)
    candidates = {}
    for name in CANDIDATES:
        model, inputs = workload.make()
        candidates[name] = make(name, optimizer, model, gloo)
    samples: dict[str, dict[str, list[float]]] = {
        name: {"step": [], "alone": []} for name in CANDIDATES
    }
    began = time.monotonic()
    rounds = 0
    steps = 1
    # The first round brings what a first step brings, and tells how long one is.
    while rounds <= ROUNDS or slowest(time.monotonic() - began) < seconds:
        order = CANDIDATES if rounds % 2 == 0 else CANDIDATES[::-1]
        for name in order:
            trained = candidates[name]
            trained.backward(inputs)  # what was in the cache was another's
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            trained.optimizer.step()
            trained.finish()
            alone = slowest(time.perf_counter() - start)
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            for _ in range(steps):
                trained.step(inputs)
            trained.finish()
            step = slowest(time.perf_counter() - start) / steps
            if rounds > 0:
                samples[name]["step"].append(step)
                samples[name]["alone"].append(alone)
        if rounds == 0:
            steps = max(1, round(BLOCK / step))
        rounds += 1
    return samples


def proportional_set_size() -> int:
    """Return the PSS of all ranks together, in bytes. Collective."""
    gc.collect()
    MPI.COMM_WORLD.Barrier()
    with open("/proc/self/smaps_rollup", encoding="utf-8") as file:
        lines = {line.split(":")[0]: line for line in file if ":" in line}
    total: int = MPI.COMM_WORLD.allreduce(1024 * int(lines["Pss"].split()[1]))
    return total


def measure_memory(workload: Workload, optimizer: str, candidate: str) -> float:
    """Return the bytes of parameters and state on the node. Collective."""
    ranks = MPI.COMM_WORLD.size
    # What a first step brings with it: modules that torch imports, buffers of its libraries.
    tiny = make(candidate, optimizer, torch.nn.Linear(8, 8), None)
    tiny.step(torch.ones(8, 8))
    model, inputs = workload.make()
    model(inputs).square().mean().backward()
    del model
    before = proportional_set_size()
    model, inputs = workload.make()
    gradients = ranks * sum(parameter.nbytes for parameter in model.parameters())
    trained = make(candidate, optimizer, model, None)
    for _ in range(3):
        trained.step(inputs)
    trained.finish()
    return proportional_set_size() - before - gradients


def rows_of(records: list[dict[str, Any]]) -> list[list[str]]:
    """Return a table of what was measured for a model, in ms and as ratios to each candidate."""
    rows = [["", "step", "ours / it", "optimizer", "ours / it"]]
    ours = next(record for record in records if record["candidate"] == OURS_NODE)
    for record in records:
        row = [record["candidate"]]
        for part in ("step", "alone"):
            row.append(f"{1000 * statistics.median(record[part]):.1f}")
            row.append(show_ratio(ratio(ours[part], record[part])))
        rows.append(row)
    return rows


def main() -> None:
    """Measure and print tables on rank 0. Collective."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MEASURED, metavar="NAME")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--seconds", type=float, default=15, help="for each model and optimizer")
    parser.add_argument("--json", metavar="FILE", help="write the figures, machine and versions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mpiddp.init_process_group()
    gloo = dist.new_group(backend="gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    # First, while no memory lies about that was used and given back.
    for candidate in (OURS_NODE, OURS):
        held = measure_memory(MODELS[IN_MEMORY], "AdamW", candidate)
        record = {"model": IN_MEMORY, "optimizer": "AdamW", "ranks": ranks, "candidate": candidate}
        memory.append({**record, "bytes": held})
        gc.collect()
    for model in args.models:
        for optimizer in args.optimizers:
            samples = measure(MODELS[model], optimizer, args.seconds, gloo)
            gc.collect()
            records = [
                {
                    "model": model,
                    "optimizer": optimizer,
                    "ranks": ranks,
                    "candidate": name,
                    **samples[name],
                }
                for name in CANDIDATES
            ]
            results += records
            if rank == 0:
                rows = rows_of(records)
                rows[0][0] = f"{model}, {optimizer}, {ranks} ranks"
                print(table(rows), end="\n\n", flush=True)
    if rank == 0:
        shown = [[f"parameters and state of {IN_MEMORY}, AdamW, {ranks} ranks", "MB"]]
        shown += [[record["candidate"], f"{record['bytes'] / 1e6:.0f}"] for record in memory]
        print(table(shown), end="\n\n", flush=True)
        if args.json:
            machine = describe_machine(MPI.Get_library_version())
            found = {"machine": machine, "optimizers": results, "optimizer_memory": memory}
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1)
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

"""Measure what gradient synchronisation adds to a training step, beside the alternatives.

    mpirun -n 2 python benchmarks/exposed.py [--views off] [--json FILE]

Exposed time is the median step less the median of the same step without synchronisation. All
candidates are measured in turn in each round, so that a busy machine slows all of them: compare
within one run, by ratios. Candidates are mpiddp, torch's class over Gloo, and what a user of
mpi4py writes by hand: one blocking Allreduce of all gradients flattened, or one a parameter.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS
from mpi4py import MPI
from torch import nn

import mpiddp

Step = Callable[[bool], None]


def make_step(model: nn.Module, inputs: torch.Tensor, after: Callable[[], None]) -> Step:
    """Return a function that takes one step, synchronised or not."""

    def step(synchronised: bool) -> None:
        quiet = nullcontext() if synchronised or not hasattr(model, "no_sync") else model.no_sync()
        with quiet:
            model.zero_grad(set_to_none=False)
            model(inputs).float().square().mean().backward()
            if synchronised:
                after()

    return step


def flattened(model: nn.Module) -> Callable[[], None]:
    """Return a blocking Allreduce of all gradients in one flat buffer."""
    parameters = list(model.parameters())
    flat = torch.empty(sum(p.numel() for p in parameters))
    sizes = [p.numel() for p in parameters]

    def reduce() -> None:
        torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None], out=flat)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat.numpy())
        flat.div_(MPI.COMM_WORLD.size)
        for parameter, piece in zip(parameters, flat.split(sizes), strict=True):
            parameter.grad.copy_(piece.view_as(parameter))

    return reduce


def one_each(model: nn.Module) -> Callable[[], None]:
    """Return one blocking Allreduce a parameter."""

    def reduce() -> None:
        for parameter in model.parameters():
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, parameter.grad.numpy())
            parameter.grad.div_(MPI.COMM_WORLD.size)

    return reduce


def candidates(make: Callable[[], tuple[nn.Module, torch.Tensor]], views: bool) -> dict[str, Step]:
    """Return the steps to compare, by name. Collective."""
    torch.manual_seed(dist.get_rank())
    model, inputs = make()
    model.requires_grad_(True)
    gloo = dist.new_group(backend="gloo")
    torch_class = torch.nn.parallel.DistributedDataParallel
    ours = mpiddp.DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=views)
    theirs = torch_class(copy.deepcopy(model), process_group=gloo, gradient_as_bucket_view=views)
    flat, single = copy.deepcopy(model), copy.deepcopy(model)
    return {
        "mpiddp": make_step(ours, inputs, lambda: None),
        "torch DDP, Gloo": make_step(theirs, inputs, lambda: None),
        "Allreduce, flattened": make_step(flat, inputs, flattened(flat)),
        "Allreduce a parameter": make_step(single, inputs, one_each(single)),
    }


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return for each candidate and round the seconds of a step with and without. Collective."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            step(True)
    for _ in range(rounds):
        for name, step in steps.items():
            seconds = {}
            for synchronised in (True, False):
                step(synchronised)
                MPI.COMM_WORLD.Barrier()
                began = time.perf_counter()
                step(synchronised)
                step(synchronised)
                MPI.COMM_WORLD.Barrier()
                seconds[synchronised] = (time.perf_counter() - began) / 2
            samples[name].append((seconds[True], seconds[False]))
    return samples


def main() -> None:
    """Measure and print a table on rank 0. Collective."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--views", choices=("on", "off"), default="on")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", metavar="FILE", help="write samples, machine and versions")
    args = parser.parse_args()

    torch.set_num_threads(1)
    mpiddp.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    result: dict[str, Any] = {
        "machine": platform.platform(),
        "mpi": MPI.Get_library_version().splitlines()[0],
        "torch": torch.__version__,
        "ranks": ranks,
        "gradient_as_bucket_view": args.views == "on",
        "models": {},
    }
    if rank == 0:
        print(f"exposed ms a step (share of mpiddp's); {ranks} ranks, views {args.views}")
    for name in args.models:
        samples = measure(candidates(MODELS[name], args.views == "on"), args.rounds)
        result["models"][name] = samples
        if rank == 0:
            without = statistics.median(bare for pairs in samples.values() for _, bare in pairs)
            print(f"{name}: {1e3 * without:.1f} ms without synchronisation")
            exposed = {
                candidate: statistics.median(full - bare for full, bare in pairs)
                for candidate, pairs in samples.items()
            }
            for candidate, seconds in exposed.items():
                share = f"{seconds / exposed['mpiddp']:.2f}" if exposed["mpiddp"] > 0 else "-"
                print(f"    {candidate:24} {1e3 * seconds:8.2f}  ({share})", flush=True)
    if rank == 0 and args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

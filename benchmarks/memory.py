"""Measure the memory that synchronisation takes, in units of the gradients' size.

    mpirun -n 2 python benchmarks/memory.py --candidate mpiddp [--json FILE]

One candidate a job, because memory is not given back cleanly. The measure is the proportional set
size (PSS) of a rank, in which shared pages count for a share each: after some steps, less that of
the same rank before it wrapped the model (it had taken steps and dropped the gradients, and had
wrapped a tiny model: for the first one torch imports modules of some 70 MB). So 1.0 is the buckets,
where `.grad` lives with views; without views `.grad` itself is 1.0 more. Each step drops the
gradients first, as zero_grad does. A second reading many steps later shows what grows.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from measuring import describe_machine, table
from mpi4py import MPI
from names import GLOO, OURS, OURS_MPI
from workloads import MODELS

import mpiddp

MODEL = "3 x Linear(4096)"
SOON, LATER = 5, 40


def proportional_set_size() -> int:
    """Return this process's PSS in bytes, on average over the ranks. Collective."""
    gc.collect()
    MPI.COMM_WORLD.Barrier()
    with open("/proc/self/smaps_rollup", encoding="utf-8") as file:
        lines = {line.split(":")[0]: line for line in file if ":" in line}
    own = 1024 * int(lines["Pss"].split()[1])
    total: int = MPI.COMM_WORLD.allreduce(own)
    return total // MPI.COMM_WORLD.size


def wrap(candidate: str, model: torch.nn.Module, views: bool) -> torch.nn.Module:
    """Wrap the model. Collective."""
    if candidate == GLOO:
        gloo = dist.new_group(backend="gloo")
        torch_class = torch.nn.parallel.DistributedDataParallel
        return torch_class(model, process_group=gloo, gradient_as_bucket_view=views)
    arguments: dict[str, Any] = {"transport": "mpi"} if candidate == OURS_MPI else {}
    return mpiddp.DistributedDataParallel(model, gradient_as_bucket_view=views, **arguments)


def steps(model: torch.nn.Module, inputs: torch.Tensor, count: int) -> None:
    """Take some steps. Collective if the model is wrapped."""
    for _ in range(count):
        model.zero_grad()
        model(inputs).square().mean().backward()


def main() -> None:
    """Measure and print a table on rank 0. Collective."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--candidate", choices=(OURS, OURS_MPI, GLOO), default=OURS)
    parser.add_argument("--views", choices=("on", "off"), default="on")
    parser.add_argument("--json", metavar="FILE", help="write the figures, machine and versions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    mpiddp.init_process_group()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if (
        args.candidate == OURS_MPI
        and "transport" not in inspect.signature(mpiddp.DistributedDataParallel).parameters
    ):
        if rank == 0:
            print(f"without {OURS_MPI}: this mpiddp has no argument `transport`")
        mpiddp.destroy_process_group()
        return

    model, inputs = MODELS[MODEL].make()
    size = sum(4 * parameter.numel() for parameter in model.parameters())
    steps(model, inputs, SOON)
    model.zero_grad()
    tiny = wrap(args.candidate, torch.nn.Linear(8, 8), args.views == "on")
    steps(tiny, torch.ones(8, 8), SOON)
    before = proportional_set_size()
    wrapped = wrap(args.candidate, model, args.views == "on")
    steps(wrapped, inputs, SOON)
    soon = (proportional_set_size() - before) / size
    steps(wrapped, inputs, LATER)
    later = (proportional_set_size() - before) / size
    if rank == 0:
        rows = [
            [f"extra memory a rank, {ranks} ranks", "views", f"{SOON} steps", f"{LATER} more"],
            [args.candidate, args.views, f"{soon:.3f}", f"{later:.3f}"],
        ]
        print(table(rows), end="\n\n", flush=True)
        if args.json:
            machine = describe_machine(MPI.Get_library_version())
            record = {
                "candidate": args.candidate,
                "views": args.views == "on",
                "ranks": ranks,
                "bytes": size,
                "soon": soon,
                "later": later,
            }
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump({"machine": machine, "memory": [record]}, file, indent=1)
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

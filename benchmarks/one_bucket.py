"""Measure the mean of one full bucket, gradients in place, beside MPI's own all-reduce.

    mpirun -n 2 python benchmarks/one_bucket.py [--json FILE]

mpiddp's side is all that lies between the last hook of a bucket and the end of backward: the
reducer, the engine and a transport, on a gradient that is a view into its bucket (a block of calls
is made within one backward). MPI's side is the bare call on memory of the same size: it gives the
sum and owes the division. The limit is limit.c without its copies. The time of a call is that of
the slowest rank.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from limit import Limit
from measuring import describe_machine, quartiles, ratio, show_ratio, table
from mpi4py import MPI
from names import LIMIT_IN_PLACE, OURS, OURS_MPI
from torch import nn

import mpiddp

KIB = 1 << 10
SIZES = (64 * KIB, 1024 * KIB, 25 * 1024 * KIB, 100 * 1024 * KIB)
BLOCK_SECONDS = 0.02

# Does the same a number of times.
Calls = Callable[[int], None]


class Within(torch.autograd.Function):
    """Call something from within a backward, where autograd lets itself be given callbacks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
        """Remember the action."""
        ctx.action = action
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Call it."""
        ctx.action()
        return gradient, None


class Engine:
    """One bucket of a model with a single parameter, driven without a forward."""

    def __init__(self, count: int, **arguments: Any) -> None:
        model = nn.Module()
        model.register_parameter("only", nn.Parameter(torch.zeros(count)))
        wrapped = mpiddp.DistributedDataParallel(model, gradient_as_bucket_view=True, **arguments)
        self.wrapped = wrapped
        self.parameter = next(model.parameters())
        self.reducer = wrapped.reducer
        self.parameter.grad = torch.full((count,), float(dist.get_rank()))
        # The first makes `.grad` a view, the second comes after the rebuild of buckets.
        for _ in range(2):
            self.reducer._rebuild_buckets()
            self.means(1)

    def means(self, times: int) -> None:
        """Do as often what the end of a backward does with the one parameter. Collective."""

        def action() -> None:
            for _ in range(times):
                self.reducer.prepare_for_forward()
                self.reducer.prepare_for_backward([])
                self.reducer.run_hook(0)
                self.reducer.end_of_backward()

        apply: Any = Within.apply  # torch has no types for it
        apply(torch.zeros(1, requires_grad=True), action).backward()


def repeated(call: Callable[[], object]) -> Calls:
    """Return a function that calls `call` a number of times."""

    def calls(times: int) -> None:
        for _ in range(times):
            call()

    return calls


def everyone(size: int) -> dict[str, Calls]:
    """Return what is compared, by name. Collective."""
    count = size // 4
    comm = MPI.COMM_WORLD
    made: dict[str, Calls] = {}
    engines = {OURS: Engine(count)}
    if "transport" in inspect.signature(mpiddp.DistributedDataParallel).parameters:
        engines[OURS_MPI] = Engine(count, transport="mpi")
    expected = (comm.size - 1) / 2
    for name, engine in engines.items():
        gradient = engine.parameter.grad
        assert gradient is not None
        if not torch.equal(gradient, torch.full_like(gradient, expected)):
            raise RuntimeError(f"{name} computes a wrong mean of {size} bytes")
        made[name] = engine.means
    own, total = torch.zeros(count).numpy(), torch.zeros(count).numpy()
    made["Allreduce, in place"] = repeated(lambda: comm.Allreduce(MPI.IN_PLACE, total))
    made["Allreduce, out of place"] = repeated(lambda: comm.Allreduce(own, total))
    made["Iallreduce and wait, in place"] = repeated(
        lambda: comm.Iallreduce(MPI.IN_PLACE, total).Wait()
    )
    made["Iallreduce and wait, out of place"] = repeated(lambda: comm.Iallreduce(own, total).Wait())
    if mpiddp.get_topology().node_count == 1:
        limit = Limit([torch.zeros(count)], comm, in_place=True)
        made[LIMIT_IN_PLACE] = repeated(lambda: limit.step(False))
    return made


def block(calls: Calls, times: int) -> float:
    """Return the seconds of a call in a block of some, on the slowest rank. Collective."""
    calls(1)
    MPI.COMM_WORLD.Barrier()
    began = time.perf_counter()
    calls(times)
    seconds = (time.perf_counter() - began) / times
    return float(MPI.COMM_WORLD.allreduce(seconds, MPI.MAX))


def measure(size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call in each round. Collective."""
    made = everyone(size)
    times = {}
    for name, calls in made.items():
        block(calls, 2)
        times[name] = max(1, min(500, math.ceil(BLOCK_SECONDS / block(calls, 2))))
    seconds: dict[str, list[float]] = {name: [] for name in made}
    order = list(made)
    shuffle = random.Random(1).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            seconds[name].append(block(made[name], times[name]))
    return seconds


def report(size: int, ranks: int, seconds: dict[str, list[float]]) -> str:
    """Return the table of one size."""
    rows = [[f"{size // KIB} KB, {ranks} ranks", "ms", "quartiles", "mpiddp / it", "(90 %)"]]
    for name, samples in seconds.items():
        low, middle, high = quartiles([1e3 * sample for sample in samples])
        shown = "-" if name == OURS else show_ratio(ratio(seconds[OURS], samples))
        value, _, spread = shown.partition(" ")
        rows.append([name, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", value, spread])
    return table(rows)


def main() -> None:
    """Measure and print a table on rank 0. Collective."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", metavar="FILE", help="write samples, machine and versions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    mpiddp.init_process_group()
    ranks, results = dist.get_world_size(), []
    for size in SIZES:
        seconds = measure(size, args.rounds)
        results.append({"bytes": size, "ranks": ranks, "seconds": seconds})
        if dist.get_rank() == 0:
            print(report(size, ranks, seconds), end="\n\n", flush=True)
    if dist.get_rank() == 0 and args.json:
        machine = describe_machine(MPI.Get_library_version())
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "one_bucket": results}, file, indent=1)
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

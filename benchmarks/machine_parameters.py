"""Measure what cost_model.py must know of a machine, and the steps it is compared with.

    mpirun ... python benchmarks/machine_parameters.py (parameters | rate | steps) --json FILE

`parameters`: latencies, copies, sums and what the network's software carries, on links that
nothing limits. `rate`: what a node's link carries. `steps`: training steps whose backward sleeps
instead of computing, so that hosts which share a few cores disturb each other little. All ranks
measure at once, because all of them work at once in a step. The same number of ranks on each node,
one node after another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import exposed
import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from names import GLOO, OURS, OURS_MPI
from torch import nn
from workloads import Workload

import mpiddp

LAYERS = 12
LAYER_BYTES = 4 << 20
# Longer than any cache holds.
LONG = 32 << 20
REPEATS = 7


class Sleep(torch.autograd.Function):
    """Pass a tensor through; in backward, sleep and make a gradient for the weight."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: torch.Tensor, seconds: float) -> Any:
        """Remember how long to sleep."""
        ctx.seconds = seconds
        ctx.shape = weight.shape
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Sleep, then return the gradients."""
        time.sleep(ctx.seconds)
        return gradient, torch.full(ctx.shape, gradient.sum().item()), None


class SleepingLayers(nn.Module):
    """Layers with large gradients whose backward sleeps `seconds` in all."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layers = nn.ParameterList(torch.zeros(LAYER_BYTES // 4) for _ in range(LAYERS))

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`."""
        for weight in self.layers:
            tensor = Sleep.apply(tensor, weight, self.seconds / LAYERS)  # type: ignore[no-untyped-call]
        return tensor


def slowest(action: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median over some calls of the time of the slowest rank. Collective."""
    samples = []
    for number in range(repeats + 1):
        MPI.COMM_WORLD.Barrier()
        began = time.perf_counter()
        action()
        taken = float(MPI.COMM_WORLD.allreduce(time.perf_counter() - began, MPI.MAX))
        if number:  # the first warms up
            samples.append(taken)
    return statistics.median(samples)


def exchange(partner: int, size: int, times: int = 1) -> float:
    """Return the seconds of one exchange of `size` bytes each way with `partner`. Collective."""
    own, other = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def action() -> None:
        for _ in range(times):
            MPI.COMM_WORLD.Sendrecv(own, partner, recvbuf=other, source=partner)

    return slowest(action) / times


def parameters() -> dict[str, float]:
    """Return latencies and bandwidths without a limit on the links. Collective."""
    topology = mpiddp.get_topology()
    rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size // topology.node_count
    node, local = divmod(rank, ranks)
    across = (node ^ 1) * ranks + local
    measured = {"latency_between": exchange(across, 8, 200)}
    if ranks > 1:
        measured["latency_inside"] = exchange(node * ranks + (local ^ 1), 8, 200)
    short, long = (exchange(across, size) for size in (8 << 20, 24 << 20))
    seconds_a_byte = (long - short) / (16 << 20)
    # All ranks of a node at once.
    measured["stack"] = ranks / seconds_a_byte
    middle = exchange(across, 256 << 10, 10)
    measured["rendezvous"] = max(
        middle - (256 << 10) * seconds_a_byte - measured["latency_between"], 0.0
    )
    one, two = np.ones(LONG // 4, np.float32), np.ones(LONG // 4, np.float32)
    measured["rank_copy"] = LONG / slowest(lambda: np.copyto(one, two))
    measured["rank_sum"] = LONG / slowest(lambda: np.add(one, two, out=one))
    gloo = dist.new_group(backend="gloo")
    number = torch.zeros(MPI.COMM_WORLD.size)

    def small() -> None:
        for _ in range(20):
            dist.all_reduce(number, group=gloo)

    measured["gloo_latency"] = slowest(small) / 20 / (2 * (MPI.COMM_WORLD.size - 1))
    return measured


def rate() -> dict[str, float]:
    """Return the bytes a second that one rank sends over its node's link. Collective."""
    topology = mpiddp.get_topology()
    rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size // topology.node_count
    node, local = divmod(rank, ranks)
    memory = np.ones(24 << 20, np.uint8)

    def one_way(size: int) -> float:
        def action() -> None:
            if local == 0 and node % 2 == 0:
                MPI.COMM_WORLD.Send(memory[:size], rank + ranks)
            elif local == 0:
                MPI.COMM_WORLD.Recv(memory[:size], rank - ranks)

        return slowest(action, 3)

    # The difference of two sizes: what a link lets pass at once after a rest is in both.
    return {"payload": (16 << 20) / (one_way(24 << 20) - one_way(8 << 20))}


def steps(backward: float, seconds: float, wanted: list[str]) -> dict[str, Any]:
    """Return the samples of steps with synchronisation and without. Collective."""
    gloo = dist.new_group(backend="gloo") if GLOO in wanted else None
    workload = Workload(lambda: (SleepingLayers(backward), torch.ones(8)))
    return exposed.run("sleeping layers", workload, gloo, wanted, [True], seconds)


def main() -> None:
    """Measure one thing. Collective."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("parameters", "rate", "steps"))
    parser.add_argument("--backward", type=float, default=0.3, help="seconds (0.3)")
    parser.add_argument("--seconds", type=float, default=10, help="for all steps (10)")
    parser.add_argument("--candidates", nargs="+", default=[OURS, OURS_MPI, GLOO])
    parser.add_argument("--json", metavar="FILE", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    mpiddp.init_process_group()
    if args.what == "parameters":
        result: dict[str, Any] = parameters()
    elif args.what == "rate":
        result = rate()
    else:
        result = {**rate(), **steps(args.backward, args.seconds, args.candidates)}
    result["mpi"] = MPI.Get_library_version().partition("\n")[0].rstrip("\0 ")
    if dist.get_rank() == 0:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

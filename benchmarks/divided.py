"""Measure models that are divided over the ranks: what communication adds to a step.

    mpirun -n 2 python benchmarks/divided.py [--seconds 20] [--json FILE] [NAME ...]

Tensor-parallel decoding (a token at a time), prefill (512 tokens) and training, and a step of
FSDP2, on mpiddp's process group, on Gloo, and on torch's `fake` backend, which moves nothing. They
take turns in an order drawn anew; a turn's time is that of the slowest rank. What a step takes
beyond the same step on `fake` is communication.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from divided_steps import FAKE, added_to
from measuring import Record, describe_machine, table
from mpi4py import MPI
from names import GLOO_GROUP, OURS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers `fake`

import mpiddp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from large_model import Decoder  # of the examples

LAYERS, WIDTH, PROMPT = 16, 512, 512
FEWEST_ROUNDS = 5
COMM = MPI.COMM_WORLD

Step = Callable[[], None]


class Layer(nn.Module):
    """Two pairs of linear layers, as attention and the rest of a decoder's layer have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.project = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` with what both pairs add to it."""
        x = x + self.project(torch.tanh(self.mix(x)))
        return x + self.down(nn.functional.gelu(self.up(x)))


def divided(mesh: DeviceMesh) -> nn.Sequential:
    """Return layers whose weights are divided over the ranks: two all-reduces a layer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(WIDTH) for _ in range(LAYERS)))
    for layer in model:
        plan = {
            "mix": ColwiseParallel(),
            "project": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    return model


def decoding(mesh: DeviceMesh) -> Step:
    """Return a step of one token: 32 all-reduces of 2 KB."""
    return forward(divided(mesh), 1)


def prefill(mesh: DeviceMesh) -> Step:
    """Return a step of a prompt: 32 all-reduces of 1 MB."""
    return forward(divided(mesh), PROMPT)


def forward(model: nn.Module, tokens: int) -> Step:
    """Return a step that only infers."""
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        with torch.no_grad():
            model(x)

    return step


def training(mesh: DeviceMesh) -> Step:
    """Return a step forward and backward of divided layers, 128 tokens."""
    model = divided(mesh)
    x = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return step


def fully_sharded(mesh: DeviceMesh) -> Step:
    """Return a step of FSDP2 with AdamW on a decoder of 50 million parameters."""
    torch.manual_seed(0)
    model = Decoder(LAYERS, WIDTH, 8, 64)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    text = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(COMM.rank))

    def step() -> None:
        optimizer.zero_grad()
        model(text).float().square().mean().backward()
        optimizer.step()

    return step


CASES: dict[str, Callable[[DeviceMesh], Step]] = {
    "decoding, 1 token": decoding,
    f"prefill, {PROMPT} tokens": prefill,
    "training, divided layers": training,
    "training, FSDP2": fully_sharded,
}


def turn(step: Step) -> float:
    """Return the seconds of a step on the slowest rank. Collective."""
    COMM.Barrier()
    began = time.perf_counter()
    step()
    return float(COMM.allreduce(time.perf_counter() - began, MPI.MAX))


def measure(make: Callable[[DeviceMesh], Step], limit: float) -> dict[str, list[float]]:
    """Return the seconds of steps on each backend, by turns for about `limit`. Collective."""
    groups: dict[str, Any] = {OURS: dist.group.WORLD}
    groups |= {GLOO_GROUP: dist.new_group(backend="gloo"), FAKE: dist.new_group(backend="fake")}
    # DTensor takes what it has found for a mesh for all that are equal, groups aside: names differ.
    steps = {
        name: make(DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"of_{number}",)))
        for number, (name, group) in enumerate(groups.items())
    }
    for step in steps.values():
        for _ in range(3):
            turn(step)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order, draw = list(steps), random.Random(1)
    began = time.monotonic()
    while COMM.bcast(len(seconds[FAKE]) < FEWEST_ROUNDS or time.monotonic() - began < limit):
        draw.shuffle(order)
        for name in order:
            # The first step after another backend's is a warm-up: caches are the other's.
            turn(steps[name])
            seconds[name].append(turn(steps[name]))
    return seconds


def report(records: list[Record]) -> str:
    """Return the table."""
    head = [f"ms, {COMM.size} ranks", FAKE, f"{OURS} adds", f"{GLOO_GROUP} adds"]
    rows = [[*head, f"{OURS} / {GLOO_GROUP}", f"step / {FAKE}"]]
    rows += [[record["case"], *added_to(record["seconds"])] for record in records]
    return table(rows)


def main() -> None:
    """Measure and print a table on rank 0. Collective."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20, help="a case, about (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write samples, machine and versions")
    parser.add_argument("names", nargs="*", help="of cases; none: all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mpiddp.init_process_group()
    records = [
        {"case": name, "ranks": COMM.size, "seconds": measure(CASES[name], args.seconds)}
        for name in args.names or CASES
    ]
    mpiddp.destroy_process_group()
    if COMM.rank == 0:
        print(report(records), flush=True)
        if args.json:
            machine = describe_machine(MPI.Get_library_version())
            written = {"machine": machine, "divided": records}
            Path(args.json).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

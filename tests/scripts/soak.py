"""Train random models for many steps, with forks and groups that come and go; print what grows.

    mpirun -n 2 python soak.py STEPS

Rank 0 prints a line of JSON: of each rank, kilobytes of memory, descriptors, threads and
communicators, after the first fifth of the rounds and at the end.
"""

import gc
import itertools
import json
import os
import random
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mpiddp
from mpiddp import DistributedDataParallel as DDP
from mpiddp.mpi import communicators

STEPS_OF_A_ROUND = 50
ROUNDS = max(10, int(sys.argv[1]) // STEPS_OF_A_ROUND)


def handle() -> int:
    """Return the number of a new communicator: MPIs give the first that is free. Collective."""
    from mpi4py import MPI

    new = MPI.COMM_WORLD.Dup()
    number = new.py2f()
    new.Free()
    return number


def use() -> dict[str, int]:
    """Return what this process uses of what could leak. Collective."""
    gc.collect()
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return {
        "memory": int(lines["RssAnon"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "communicators": len(communicators.known()),
        "handle": handle(),
        "maps": sum(1 for _ in open("/proc/self/maps")),
    }


def train(draw: random.Random) -> None:
    widths = [draw.randint(1, 48) for _ in range(draw.randint(2, 5))]
    layers = [nn.Linear(before, after) for before, after in itertools.pairwise(widths)]
    group = dist.new_group() if draw.random() < 0.3 else None
    model = DDP(
        nn.Sequential(*layers),
        process_group=group,
        bucket_cap_mb=draw.choice([0.001, 0.01, 25]),
        find_unused_parameters=draw.random() < 0.3,
        gradient_as_bucket_view=draw.random() < 0.5,
        static_graph=draw.random() < 0.3,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS_OF_A_ROUND):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(torch.ones(2, widths[0])).sum().backward()
        optimizer.step()
    dist.all_reduce(torch.ones(draw.randint(1, 100)), async_op=True, group=group).wait()
    del model, optimizer
    if group is not None:
        dist.destroy_process_group(group)


def fork() -> None:
    """Let a worker by fork load some batches."""
    data = TensorDataset(torch.arange(8.0))
    loader = DataLoader(data, 4, num_workers=1, multiprocessing_context="fork")
    assert sum(batch.sum().item() for (batch,) in loader) == 28


def main() -> None:
    torch.set_num_threads(1)
    mpiddp.init_process_group()
    draw = random.Random(1)  # the same on all ranks
    early = {}
    for number in range(ROUNDS):
        train(draw)
        if number % max(1, ROUNDS // 20) == 0:
            fork()
        if number == ROUNDS // 5:
            early = use()
    late = use()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [early, late])
    if dist.get_rank() == 0:
        print(json.dumps({"steps": ROUNDS * STEPS_OF_A_ROUND, "ranks": everyone}))
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

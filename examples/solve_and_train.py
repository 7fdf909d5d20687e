"""Solve the heat equation and train on it, on the same ranks: learn what a field becomes.

    mpirun -n 2 python examples/solve_and_train.py

Each rank has a part of the fields, solves it with its neighbours, and trains on its part. The
messages of the solver go over MPI.COMM_WORLD; mpiddp has communicators of its own.
"""

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from solver import BATCHES, FIELDS, POINTS, SUBSTEPS, advance, with_neighbours
from torch import nn

import mpiddp


def main() -> None:
    """Solve and train, step by step. Collective over MPI.COMM_WORLD."""
    world = MPI.COMM_WORLD
    mpiddp.init_process_group()
    model = mpiddp.DistributedDataParallel(nn.Conv1d(1, 1, 2 * SUBSTEPS + 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    random = np.random.default_rng(world.rank)
    loss = torch.tensor(0.0)
    for _ in range(BATCHES // 2):
        part = random.standard_normal((FIELDS, POINTS // world.size), np.float32)
        wide = with_neighbours(part, world)
        now, later = (torch.from_numpy(field).unsqueeze(1) for field in (wide, advance(wide)))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(now), later)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"{world.size} ranks solved and trained: loss {loss.item():.2e}")
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train on fields that another program of the job solves: learn what a field becomes.

    mpirun -n 2 python examples/solver.py : -n 2 python examples/train_beside.py

Comments starting with MPI mark what a training that reads files would not have.
"""

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from solver import BATCHES, FIELDS, POINTS, SUBSTEPS
from torch import nn

import mpiddp


def main() -> None:
    """Receive and train. Collective over the ranks of all programs."""
    world = MPI.COMM_WORLD
    # MPI: all programs of the job call this. The ranks of this one train together.
    trainers = world.Split(world.Get_attr(MPI.APPNUM))
    mpiddp.init_process_group(comm=trainers)
    own = world.group.Translate_ranks(None, trainers.group)
    solvers = [rank for rank, number in enumerate(own) if number == MPI.UNDEFINED]

    # What a point becomes is the same sum of its neighbours everywhere.
    kernel = 2 * SUBSTEPS + 1
    net = nn.Conv1d(1, 1, kernel, padding="same", padding_mode="circular", bias=False)
    model = mpiddp.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    loss = torch.tensor(0.0)
    for _ in range(BATCHES // trainers.size):
        # MPI: each solver has a part of every field.
        parts = np.empty((len(solvers), 2, FIELDS, POINTS // len(solvers)), np.float32)
        for part, solver in zip(parts, solvers, strict=True):
            world.Recv(part, solver)
        now, later = torch.from_numpy(np.concatenate(list(parts), axis=2)).unsqueeze(2)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(now), later)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"{trainers.size} ranks trained beside {len(solvers)}: loss {loss.item():.2e}")
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

"""Solve the heat equation, and send what comes out to another program, which trains on it.

    mpirun -n 2 python examples/solver.py : -n 2 python examples/train_beside.py

Each rank has a part of a ring of points, and of several fields at a time: it knows its neighbours'
next points by messages. It uses mpi4py and numpy, and knows nothing of torch or mpiddp.
"""

import numpy as np
from mpi4py import MPI

POINTS = 64
SUBSTEPS = 8  # so many points on either side matter to what a point becomes
FIELDS = 32  # solved at a time, one batch of the training
BATCHES = 64

Array = np.ndarray


def with_neighbours(part: Array, solvers: MPI.Intracomm) -> Array:
    """Return the fields with SUBSTEPS points more on either side. Collective over `solvers`."""
    left, right = (solvers.rank - 1) % solvers.size, (solvers.rank + 1) % solvers.size
    of_left = np.empty((len(part), SUBSTEPS), np.float32)
    of_right = np.empty_like(of_left)
    first, last = part[:, :SUBSTEPS].copy(), part[:, -SUBSTEPS:].copy()
    solvers.Sendrecv(last, right, recvbuf=of_left, source=left)
    solvers.Sendrecv(first, left, recvbuf=of_right, source=right)
    return np.concatenate([of_left, part, of_right], axis=1)


def advance(wide: Array) -> Array:
    """Return the fields some time later, without what `with_neighbours` has added."""
    for _ in range(SUBSTEPS):
        wide = wide[:, 1:-1] + 0.25 * (wide[:, :-2] - 2 * wide[:, 1:-1] + wide[:, 2:])
    return wide


def main() -> None:
    """Solve and send. Collective over the ranks of all programs."""
    world = MPI.COMM_WORLD
    # All programs of the job call this: each gets a communicator of its own ranks.
    solvers = world.Split(world.Get_attr(MPI.APPNUM))
    own = world.group.Translate_ranks(None, solvers.group)
    trainers = [rank for rank, number in enumerate(own) if number == MPI.UNDEFINED]
    random = np.random.default_rng(solvers.rank)
    for batch in range(BATCHES):
        part = random.standard_normal((FIELDS, POINTS // solvers.size), np.float32)
        later = advance(with_neighbours(part, solvers))
        world.Send(np.stack([part, later]), trainers[batch % len(trainers)])


if __name__ == "__main__":
    main()

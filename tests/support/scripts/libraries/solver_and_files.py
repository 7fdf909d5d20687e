"""Train, and between two steps solve with PETSc and write with parallel HDF5, if asked.

mpirun -n 2 python solver_and_files.py FILE [petsc4py] [h5py]
"""

import sys

import torch
from mpi4py import MPI

import mpiddp

STEPS, CELLS = 6, 200


class Solver:
    """A Laplacian in one dimension, divided among the ranks."""

    def __init__(self) -> None:
        import petsc4py

        petsc4py.init([])
        from petsc4py import PETSc

        matrix = PETSc.Mat().createAIJ((CELLS, CELLS), nnz=3, comm=PETSc.COMM_WORLD)
        first, end = matrix.getOwnershipRange()
        for row in range(first, end):
            matrix[row, row] = 2
            for column in {max(row - 1, 0), min(row + 1, CELLS - 1)} - {row}:
                matrix[row, column] = -1
        matrix.assemble()
        self.ksp = PETSc.KSP().create()
        self.ksp.setOperators(matrix)
        self.ksp.setType("cg")
        self.ksp.getPC().setType("jacobi")
        self.ksp.setTolerances(rtol=1e-10)
        self.matrix = matrix

    def solve(self) -> None:
        field, right = self.matrix.createVecs()
        right.set(1.0)
        self.ksp.solve(right, field)
        left = self.matrix * field - right
        assert self.ksp.getConvergedReason() > 0
        assert left.norm() < 1e-6 * right.norm()


def main() -> None:
    world = MPI.COMM_WORLD
    name, beside = sys.argv[1], sys.argv[2:]
    mpiddp.init_process_group()
    solver = Solver() if "petsc4py" in beside else None
    file = losses = None
    if "h5py" in beside:
        import h5py

        file = h5py.File(name, "w", driver="mpio", comm=world)
        losses = file.create_dataset("losses", (STEPS, world.size), "f8")
        weights = file.create_dataset("weights", (STEPS, world.size, 64), "f4")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    ddp = mpiddp.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    torch.manual_seed(10 + world.rank)
    own = []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(32, 8)
        loss = (ddp(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if solver is not None:  # between the backward and the step
            solver.solve()
        optimizer.step()
        own.append(loss.item())
        if file is not None:
            losses[step, world.rank] = own[-1]
            with weights.collective:
                weights[step, world.rank] = model[0].weight.detach().numpy().reshape(-1)
    everyones = world.gather(own)
    if file is not None:
        file.close()
        if world.rank == 0:
            with h5py.File(name) as written:
                assert written["losses"][:].T.tolist() == everyones
                last = written["weights"][STEPS - 1]
                assert (last == model[0].weight.detach().numpy().reshape(-1)).all()
    if world.rank == 0:
        print("losses", *(loss.hex() for of_rank in everyones for loss in of_rank))
    mpiddp.destroy_process_group()


main()

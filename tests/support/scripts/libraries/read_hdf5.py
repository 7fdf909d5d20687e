"""Train on batches of an HDF5 file that all ranks have written, read by the ranks or by workers.

mpirun -n 2 python read_hdf5.py FILE memory|loop|collective|fork|forkserver|spawn
"""

import sys

import mpi4py

if __name__ == "__mp_main__":  # a worker by forkserver or spawn
    mpi4py.rc.initialize = False  # else importing h5py begins MPI, and ends the job

import h5py
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, Dataset

import mpiddp

SAMPLES, BATCH = 96, 4


class Samples(Dataset[torch.Tensor]):
    """Samples of a file that each process opens for itself, without MPI."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.file: h5py.File | None = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file = h5py.File(self.name)
        return torch.from_numpy(self.file["samples"][index])


class OfAllRanks(Samples):
    """Samples of a file that the ranks have open together."""

    def __init__(self, name: str, collective: bool) -> None:
        super().__init__(name)
        self.file = h5py.File(name, driver="mpio", comm=MPI.COMM_WORLD)
        self.collective = collective

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.file is not None
        samples = self.file["samples"]
        if self.collective:
            with samples.collective:
                return torch.from_numpy(samples[index])
        return torch.from_numpy(samples[index])

    def close(self) -> None:
        assert self.file is not None
        self.file.close()


def made() -> torch.Tensor:
    return torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(3))


def write(name: str) -> None:
    """Write the samples, each rank its part."""
    world = MPI.COMM_WORLD
    values = made().numpy()
    with h5py.File(name, "w", driver="mpio", comm=world) as file:
        samples = file.create_dataset("samples", values.shape, "f4")
        own = slice(world.rank * SAMPLES // world.size, (world.rank + 1) * SAMPLES // world.size)
        samples[own] = values[own]


def main() -> None:
    name, how = sys.argv[1:]
    mpiddp.init_process_group()
    write(name)
    samples: Dataset[torch.Tensor] | torch.Tensor = made()
    options = {}
    if how in ("loop", "collective"):
        samples = OfAllRanks(name, how == "collective")
    elif how != "memory":
        samples = Samples(name)
        options = {"num_workers": 2, "multiprocessing_context": how, "persistent_workers": True}
    sampler = torch.utils.data.DistributedSampler(samples, seed=5)
    loader = DataLoader(samples, batch_size=BATCH, sampler=sampler, **options)
    torch.manual_seed(1)
    ddp = mpiddp.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    own = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs in loader:
            optimizer.zero_grad()
            loss = (ddp(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            own.append(loss.item())
    everyones = MPI.COMM_WORLD.gather(own)
    if isinstance(samples, OfAllRanks):
        samples.close()
    if MPI.COMM_WORLD.rank == 0:
        print("losses", *(loss.hex() for of_rank in everyones for loss in of_rank))
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

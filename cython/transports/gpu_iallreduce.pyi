import torch
from mpi4py import MPI

from mpiddp.transports.gpu_ring import GpuRingTransport

class GpuIallreduceTransport(GpuRingTransport):
    def __init__(
        self,
        communicator: MPI.Comm,
        device: torch.device,
        *,
        chunk_bytes: int = 4194304,
        window: int = 2,
    ) -> None: ...

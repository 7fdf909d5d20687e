from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpiddp.gpu.runtime import Runtime
from mpiddp.transports.gpu_direct import PointerMemory

class GpuRingTransport:
    runtime: Runtime
    device: torch.device
    def __init__(
        self,
        communicator: MPI.Comm,
        device: torch.device,
        *,
        chunk_bytes: int = 4194304,
        window: int = 4,
    ) -> None: ...
    def allocate(
        self, sizes: Sequence[int], tails: Sequence[int] | None = None
    ) -> list[PointerMemory]: ...
    def free(self) -> None: ...
    def raise_failure(self, code: int, call: bytes) -> None: ...
    @property
    def address(self) -> int: ...

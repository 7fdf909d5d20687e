from collections.abc import Iterable

from mpi4py import MPI

from mpiddp.memory import BucketMemory

class IallreduceTransport:
    def __init__(
        self, communicator: MPI.Comm, *, chunk_bytes: int = 524288, window: int = 2
    ) -> None: ...
    def allocate(self, sizes: Iterable[int]) -> list[BucketMemory]: ...
    def free(self) -> None: ...
    @property
    def address(self) -> int: ...

from collections.abc import Sequence

from mpi4py import MPI

from mpiddp.engine.memory import BucketMemory

class LaneTransport:
    def __init__(
        self,
        communicator: MPI.Comm,
        node: MPI.Comm,
        *,
        chunk_bytes: int = 524288,
        window: int = 2,
    ) -> None: ...
    def allocate(self, sizes: Sequence[int]) -> list[BucketMemory]: ...
    def free(self) -> None: ...
    @property
    def address(self) -> int: ...

from collections.abc import Mapping, Sequence

from mpi4py import MPI

from mpiddp.engine.memory import BucketMemory
from mpiddp.transports.wire import Wire

class LaneTransport:
    wire: Wire | None
    def __init__(
        self,
        communicator: MPI.Comm,
        node: MPI.Comm,
        *,
        chunk_bytes: int = 524288,
        window: int = 2,
        ways: Mapping[int, Sequence[tuple[int, str]]] | None = None,
        group: int = 1,
    ) -> None: ...
    def allocate(self, sizes: Sequence[int]) -> list[BucketMemory]: ...
    def free(self) -> None: ...
    @property
    def address(self) -> int: ...

from collections.abc import Sequence

from mpi4py import MPI

from mpiddp.engine.memory import BucketMemory

def make_bell(node: MPI.Comm, state: int) -> object: ...

class SharedTransport:
    def __init__(
        self,
        node: MPI.Comm,
        *,
        chunk_bytes: int = 65536,
        crowded: bool = False,
        wants_thread: bool = False,
    ) -> None: ...
    def allocate(self, sizes: Sequence[int]) -> list[BucketMemory]: ...
    def allocate_once(self, sizes: Sequence[int], domain: int) -> list[BucketMemory]: ...
    def free(self) -> None: ...
    @property
    def address(self) -> int: ...

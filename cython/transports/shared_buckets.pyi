from collections.abc import Sequence

from mpi4py import MPI

from mpiddp.engine.memory import BucketMemory

class SharedBuckets:
    def __init__(
        self,
        node: MPI.Comm,
        sizes: Sequence[int],
        chunk_bytes: int,
        longer: int = 0,
        *,
        has_owners: bool = False,
        domain: int | None = None,
    ) -> None: ...
    def memories(self, sizes: Sequence[int], rank: int) -> list[BucketMemory]: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def has_owners(self) -> bool: ...
    @property
    def ranks(self) -> int: ...
    def owners(self, bucket: int) -> list[int]: ...
    def forget_writes(self) -> None: ...
    def own_ranges(self, memory: BucketMemory) -> list[tuple[int, int]]: ...

from collections.abc import Mapping, Sequence

from mpi4py import MPI

class Wire:
    chunk_bytes: int
    window: int
    ways: Mapping[int, Sequence[tuple[int, str]]]
    def __init__(
        self,
        communicator: MPI.Comm,
        *,
        chunk_bytes: int = 524288,
        window: int = 2,
        ways: Mapping[int, Sequence[tuple[int, str]]] | None = None,
        group: int = 1,
        sums: bool = False,
    ) -> None: ...
    def free(self) -> None: ...

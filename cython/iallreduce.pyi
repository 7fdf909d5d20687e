from mpi4py import MPI

class IallreduceTransport:
    def __init__(
        self, communicator: MPI.Comm, *, chunk_bytes: int = 1048576, window: int = 2
    ) -> None: ...
    @property
    def address(self) -> int: ...

from mpi4py import MPI
from typing_extensions import Buffer

class Mapping(Buffer):
    size: int
    def __init__(self, descriptor: int, size: int, *, own: bool = False) -> None: ...

def allocate(node: MPI.Comm, size: int) -> list[Mapping]: ...

from mpi4py import MPI

from mpiddp.collectives.group_memory import GroupMemory
from mpiddp.engine.requests import Requests

GROUPS: int

def can_read_each_other(node: MPI.Comm, tries: bool = True) -> bool: ...

class NodeMemory:
    ranks: int
    is_readable: bool
    direct_from: tuple[int, int, int] | None
    def __init__(self, node: MPI.Comm, tries: bool = True) -> None: ...
    def of_group(self, index: int, ranks: int, rank: int, requests: Requests) -> GroupMemory: ...

from collections.abc import Sequence

from mpi4py import MPI

from mpiddp.engine.engine import Engine

GROUPS: int
NO_ELEMENT: int

class NodeMemory:
    ranks: int
    def __init__(self, node: MPI.Comm) -> None: ...
    def of_group(
        self, index: int, ranks: int, rank: int, engine: Engine, crowded: bool
    ) -> GroupMemory: ...

class GroupMemory:
    at_once: bool
    @property
    def address(self) -> int: ...
    def meet(self) -> MemoryPending: ...
    def reduce(
        self,
        source: int,
        target: int,
        size: int,
        element: int,
        way: int,
        divisor: float,
        root: int,
        memory: object,
    ) -> MemoryPending: ...
    def reduce_parts(
        self,
        sources: Sequence[int],
        target: int,
        size: int,
        element: int,
        way: int,
        divisor: float,
        memory: object,
    ) -> MemoryPending: ...
    def gather(
        self, source: int, targets: Sequence[int], size: int, memory: object
    ) -> MemoryPending: ...
    def spread(self, address: int, size: int, root: int, memory: object) -> MemoryPending: ...
    def trade(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        sizes: Sequence[int],
        memory: object,
    ) -> MemoryPending: ...
    def exchange(
        self, sources: Sequence[int], targets: Sequence[int], size: int, memory: object
    ) -> MemoryPending: ...
    def close(self) -> None: ...
    def clear(self) -> None: ...

class MemoryPending:
    @property
    def begun(self) -> bool: ...
    @property
    def expected(self) -> int: ...
    @property
    def left(self) -> bool: ...
    @property
    def done(self) -> bool: ...
    @property
    def job(self) -> int: ...
    def submit(self) -> None: ...
    def hand_over(self) -> None: ...
    def test(self) -> bool: ...
    def wait(self, seconds: float) -> bool: ...
    def take_back(self) -> None: ...

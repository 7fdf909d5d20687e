from collections.abc import Iterable, Sequence

import torch

from mpiddp.collectives.group_lanes import GroupLanes
from mpiddp.collectives.group_memory import GroupMemory
from mpiddp.collectives.node_memory import NodeMemory
from mpiddp.transports.shared_memory import Mapping

BYTES: int
FITS: int
DIFFERS: int
BROKEN: int

def call_digest(number: int, name: str, detail: object, tensors: Iterable[torch.Tensor]) -> int: ...
def code_of_name(name: str) -> int: ...
def code_of_dtype(dtype: torch.dtype) -> int: ...
def balance(rank: int, element_size: int, sent: Sequence[int], expected: Sequence[int]) -> int: ...

class CallTable:
    ranks: frozenset[int]
    memory: NodeMemory | None
    def __init__(
        self, mapping: Mapping, ranks: Iterable[int], memory: NodeMemory | None = None
    ) -> None: ...
    def take(self, members: int) -> int: ...
    def page(self, index: int) -> CallPage: ...

class CallPage:
    broken: int
    def enter(self, number: int, digest: int) -> int: ...
    def exchange(
        self,
        number: int,
        rank: int,
        sent: Sequence[int],
        expected: Sequence[int],
        here: Sequence[int],
        root: int = -1,
    ) -> int: ...
    def refuse(self, number: int) -> int: ...
    def break_at(self, number: int) -> None: ...
    def release(self, memory: GroupMemory | GroupLanes | None = None) -> None: ...

from collections.abc import Sequence

import torch

from mpiddp.memory import BucketMemory

def supported_dtypes() -> tuple[torch.dtype, ...]: ...
def bytes_needed(parameters: Sequence[torch.Tensor]) -> int: ...

class Bucket:
    index: int
    parameter_indices: tuple[int, ...]
    views: list[torch.Tensor]
    buffer: torch.Tensor | None
    dtype: torch.dtype
    sparse: bool
    memory: BucketMemory | None
    def __init__(
        self,
        index: int,
        parameters: Sequence[torch.Tensor],
        parameter_indices: Sequence[int],
        divisor: float,
        memory: BucketMemory | None = None,
        sparse: bool = False,
    ) -> None: ...
    @property
    def gradients(self) -> torch.Tensor: ...

from collections.abc import Sequence

import torch

def supported_dtypes() -> tuple[torch.dtype, ...]: ...

class Bucket:
    index: int
    parameter_indices: tuple[int, ...]
    views: list[torch.Tensor]
    buffer: torch.Tensor | None
    dtype: torch.dtype
    sparse: bool
    def __init__(
        self,
        index: int,
        parameters: Sequence[torch.Tensor],
        parameter_indices: Sequence[int],
        divisor: float,
        sparse: bool = False,
    ) -> None: ...
    @property
    def gradients(self) -> torch.Tensor: ...

from collections.abc import Sequence

import torch

from mpiddp.engine.engine import Channel
from mpiddp.engine.memory import BucketMemory, CommonMemory

def supported_dtypes() -> tuple[torch.dtype, ...]: ...
def view_like(buffer: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor: ...
def wire_dtype(dtype: torch.dtype, compression: torch.dtype | None = None) -> torch.dtype: ...
def bytes_needed(
    parameters: Sequence[torch.Tensor],
    compression: torch.dtype | None = None,
    flags_only: bool = False,
    dtype: torch.dtype | None = None,
) -> int: ...

class Bucket:
    index: int
    parameter_indices: tuple[int, ...]
    views: list[torch.Tensor]
    places: list[torch.Tensor]
    common: CommonMemory | None
    buffer: torch.Tensor | None
    dtype: torch.dtype
    sparse: bool
    skipped: bool
    memory: BucketMemory | None
    channel: Channel | None
    on_gpu: bool
    gradient_buffer: torch.Tensor | None
    converts: bool
    flags_only: bool
    def __init__(
        self,
        index: int,
        parameters: Sequence[torch.Tensor],
        parameter_indices: Sequence[int],
        divisor: float,
        memory: BucketMemory | None = None,
        channel: Channel | None = None,
        sparse: bool = False,
        compression: torch.dtype | None = None,
        gradients_are_views: bool = False,
        flags_only: bool = False,
        dtype: torch.dtype | None = None,
        gradient_buffer_dtype: torch.dtype | None = None,
    ) -> None: ...
    @property
    def gradients(self) -> torch.Tensor: ...
    @property
    def means(self) -> torch.Tensor | None: ...
    def own_elements(self) -> list[tuple[int, int]]: ...

from collections.abc import Iterable, Sequence

import torch

class BucketMemory:
    buffer: torch.Tensor
    owner: object
    def __init__(
        self,
        buffer: torch.Tensor,
        owner: object = None,
        context: int = 0,
        given_out: int = 0,
    ) -> None: ...

class CommonMemory(BucketMemory):
    stage: torch.Tensor
    means: torch.Tensor
    def __init__(
        self,
        buffer: torch.Tensor,
        owner: object,
        context: int,
        stage: torch.Tensor,
        means: torch.Tensor,
    ) -> None: ...

class GpuMemory(BucketMemory):
    tail: torch.Tensor
    divides_before: bool
    def __init__(
        self,
        buffer: torch.Tensor,
        owner: object = None,
        context: int = 0,
        tail: torch.Tensor | None = None,
        divides_before: bool = False,
    ) -> None: ...
    def wait_on(self, stream: int) -> int: ...

def allocate_private(sizes: Iterable[int]) -> list[BucketMemory]: ...
def allocate_pages(sizes: Sequence[int]) -> list[BucketMemory]: ...

from collections.abc import Iterable

import torch

class BucketMemory:
    buffer: torch.Tensor
    owner: object
    def __init__(self, buffer: torch.Tensor, owner: object = None, context: int = 0) -> None: ...

def allocate_private(sizes: Iterable[int]) -> list[BucketMemory]: ...

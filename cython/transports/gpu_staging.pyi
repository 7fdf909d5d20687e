from collections.abc import Sequence

import torch

from mpiddp.engine.engine import Channel
from mpiddp.engine.memory import BucketMemory
from mpiddp.gpu.runtime import Runtime

class StagingTransport:
    inner: Channel
    runtime: Runtime
    device: torch.device
    piece_bytes: int
    def __init__(
        self, inner: Channel, runtime: Runtime, device: torch.device, *, piece_bytes: int = 2097152
    ) -> None: ...
    def allocate(
        self, sizes: Sequence[int], tails: Sequence[int] | None = None
    ) -> list[BucketMemory]: ...
    def free(self) -> None: ...
    def raise_failure(self, code: int, call: bytes) -> None: ...
    @property
    def address(self) -> int: ...

from collections.abc import Sequence

import torch

from mpiddp.device_runtime import Runtime
from mpiddp.engine import Channel
from mpiddp.memory import BucketMemory, DeviceMemory

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

class StagedMemory(DeviceMemory):
    def wait_on(self, stream: int) -> int: ...

class StagedBuckets:
    def __init__(
        self,
        runtime: Runtime,
        device: int,
        sizes: Sequence[int],
        tails: Sequence[int],
        piece_bytes: int,
    ) -> None: ...
    @property
    def piece_sizes(self) -> list[int]: ...

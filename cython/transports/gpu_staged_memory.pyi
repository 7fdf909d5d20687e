from collections.abc import Sequence

from mpiddp.engine.memory import GpuMemory
from mpiddp.gpu.runtime import Runtime

class StagedMemory(GpuMemory):
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

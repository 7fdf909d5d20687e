import torch

from mpiddp.engine.engine import Channel
from mpiddp.engine.memory import BucketMemory

class SingleAllReduce:
    channel: Channel
    memory: BucketMemory
    def __init__(
        self, channel: Channel, memory: BucketMemory, dtype: torch.dtype, divisor: float
    ) -> None: ...
    def submit(self, stream: int = 0) -> None: ...
    def wait(self, timeout: float) -> bool: ...
    @property
    def done(self) -> bool: ...

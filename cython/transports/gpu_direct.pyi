import torch

from mpiddp.engine.memory import GpuMemory
from mpiddp.gpu.runtime import Runtime

class PointerMemory(GpuMemory):
    def __init__(self, runtime: Runtime, device: torch.device, size: int, tail: int) -> None: ...

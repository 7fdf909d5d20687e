import torch

from mpiddp.device_runtime import Runtime
from mpiddp.memory import DeviceMemory

class PointerMemory(DeviceMemory):
    def __init__(self, runtime: Runtime, device: torch.device, size: int, tail: int) -> None: ...

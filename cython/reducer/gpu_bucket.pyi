import torch

from mpiddp.gpu.runtime import Runtime
from mpiddp.reducer.bucket import Bucket

class GpuBucket(Bucket):
    device: torch.device
    runtime: Runtime

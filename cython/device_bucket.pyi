import torch

from mpiddp.bucket import Bucket
from mpiddp.device_runtime import Runtime

class DeviceBucket(Bucket):
    device: torch.device
    runtime: Runtime

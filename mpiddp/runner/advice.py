"""What to do about a failure that scripts written for GPUs have elsewhere: a line after it."""

from __future__ import annotations

import re

import torch

__all__ = ["advice_on"]

# torch says it in many ways, such as "Torch not compiled with CUDA enabled", "Found no NVIDIA
# driver on your system" and "module 'torch._C' has no attribute '_cuda_setDevice'".
_ABOUT_GPU = re.compile(r"\bCUDA\b|_cuda_|NVIDIA|\bHIP\b")


def advice_on(error: BaseException) -> str:
    """Return what may help, "" if nothing is known. Not collective."""
    if torch.cuda.is_available() or not _ABOUT_GPU.search(str(error)):
        return ""
    return (
        f"mpiddp: the script asks for a GPU, and torch {torch.__version__} finds none here. "
        f"Let it choose: device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')"
    )

"""Compression of tensors for the time that they travel, as Horovod names it.

`mpiddp.compression` are the hooks of DistributedDataParallel; these are for Horovod's operations.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """What Horovod asks of a compression. Not collective."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what travels instead of `tensor`, and what `decompress` must know."""
        raise NotImplementedError  # an interface, as in Horovod: subclasses say how

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor that `compress` was given, from what has travelled."""
        raise NotImplementedError  # an interface, as in Horovod: subclasses say how


class NoneCompressor(Compressor):
    """Tensors travel as they are. Not collective."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return `tensor` and None."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return `tensor`."""
        return tensor


class FP16Compressor(Compressor):
    """Tensors of floats travel in float16, others as they are. Not collective."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return `tensor` in float16, and its dtype."""
        narrow = tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor
        return narrow, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """Return `tensor` in the dtype `ctx`."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressions to choose from.

    Attributes:
        none: tensors travel as they are.
        fp16: tensors of floats travel in float16. They are added in float32, and rounded once.
    """

    none = NoneCompressor
    fp16 = FP16Compressor

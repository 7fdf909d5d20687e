"""Lets torchvision be imported where its operators cannot: PyPI's is built for a torch of CUDA.

With a torchvision for CPUs nothing is changed. A program that calls such an operator fails.
"""

import torch

__all__ = ["declare"]


def declare() -> None:
    """Declare what torchvision describes at its import, if it cannot be imported as it is."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )

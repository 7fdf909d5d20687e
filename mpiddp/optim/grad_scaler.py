"""Let the ranks of a node agree on overflows that a GradScaler finds.

A rank has the means of its own part only. So one may see an infinite mean where the others see
finite gradients, and they would skip different steps and scale differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["install"]


def install(optimizer_class: type[Any]) -> None:
    """Let every `torch.amp.GradScaler` ask an optimizer of this class. Not collective.

    Args:
        optimizer_class: has a method `agree_on_overflow`.
    """
    scaler: Any = torch.amp.GradScaler
    torchs: Callable[..., Any] = scaler._unscale_grads_

    def _unscale_grads_(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        found = torchs(self, optimizer, *args, **kwargs)
        if isinstance(optimizer, optimizer_class):
            optimizer.agree_on_overflow(found.values())
        return found

    scaler._unscale_grads_ = _unscale_grads_

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
        optimizer_class: has methods `begin_unscaling`, `agree_on_overflow` and `skip_step`.
    """
    scaler: Any = torch.amp.GradScaler
    unscale: Callable[..., Any] = scaler._unscale_grads_
    maybe_step: Callable[..., Any] = scaler._maybe_opt_step

    def _unscale_grads_(self: Any, optimizer: Any, inv_scale: Any, *args: Any) -> Any:
        if not isinstance(optimizer, optimizer_class):
            return unscale(self, optimizer, inv_scale, *args)
        optimizer.begin_unscaling()
        found = unscale(self, optimizer, inv_scale, *args)
        optimizer.agree_on_overflow(found.values(), inv_scale.item())
        return found

    def _maybe_opt_step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, optimizer_class) and any(
            found.item() for found in state["found_inf_per_device"].values()
        ):
            optimizer.skip_step()
        return maybe_step(self, optimizer, state, *args, **kwargs)

    scaler._unscale_grads_ = _unscale_grads_
    scaler._maybe_opt_step = _maybe_opt_step

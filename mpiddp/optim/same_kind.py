"""Optimizers of the same kind as one of the program, for other tensors."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from typing import Any

import torch

from mpiddp.optim.elementwise import ELEMENTWISE
from mpiddp.optim.same_settings import settings_of

__all__ = ["made_like", "problem_of"]

Optimizer = torch.optim.Optimizer


def problem_of(optimizer: Any) -> str:
    """Return why an optimizer cannot step parts, "" if nothing is known."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "its step is differentiable"
    for name, value in vars(optimizer).items():
        each = value.values() if isinstance(value, dict) else value
        if isinstance(value, Optimizer) or (
            name not in ("param_groups", "state")
            and isinstance(value, dict | list | tuple | set)
            and any(isinstance(one, Optimizer | torch.Tensor) for one in each)
        ):
            return f"it has optimizers or tensors of its own in .{name}"
    settings = settings_of(optimizer.param_groups[0])
    try:
        made_like(optimizer, [{**settings, "params": [torch.zeros(2, device="cpu")]}])
    except Exception as error:
        return f"another one like it cannot be made: {error}"
    return ""


def made_like(optimizer: Any, groups: list[dict[str, Any]]) -> Any:
    """Return an optimizer of the same class and settings for other tensors. Not collective."""
    kind: Any = type(optimizer)
    if kind in ELEMENTWISE:
        taken = inspect.signature(kind).parameters
        settings = {name: value for name, value in optimizer.defaults.items() if name in taken}
        return kind(groups, **settings)
    # As it would be made from a pickle: what its constructor takes is not known.
    made = kind.__new__(kind)
    for name, value in vars(optimizer).items():
        if name not in ("defaults", "param_groups", "state", "step") and "_hooks" not in name:
            made.__dict__[name] = value if callable(value) else copy.deepcopy(value)
    made.__setstate__(
        {"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups}
    )
    return made

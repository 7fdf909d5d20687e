"""What a commit keeps of one part of a state, and how the part goes back to it. Not collective.

A part is a model, an optimizer, something else with a ``state_dict``, or a value. Must never keep
what a later step changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mpiddp.checkpoint.trees import Copier, leaves, map_leaves
from mpiddp.elastic.shared_copies import SharedCopies

__all__ = ["Keeper", "loaded", "other_buffers", "set_buffers", "state_of"]


class Keeper:
    """Keeps one part.

    Args:
        copies: of what ranks share.
    """

    def __init__(self, copies: SharedCopies) -> None:
        self._copies = copies
        self._copier = Copier()  # of what is large: its memory is used again
        self._part: Any = None
        self._kept: Any = None
        self._buffers: dict[str, Tensor] = {}

    def keep(self, part: Any) -> None:
        """Keep the part as it is now."""
        self._part = part if _is_stateful(part) else None
        if isinstance(part, nn.Module | torch.optim.Optimizer):
            state = part.state_dict()
            kept = map_leaves(state, self._copies.held)
            lazy = any(map(is_lazy, leaves(state)))  # it can be copied in no other way
            self._kept = copy.deepcopy(kept) if lazy else self._copier.copied(kept)
            others = other_buffers(part, state)
            self._buffers = {name: buffer.detach().clone() for name, buffer in others.items()}
        else:
            self._kept = copy.deepcopy(map_leaves(state_of(part), self._copies.held))

    def put_back(self) -> Any:
        """Let the part go back to what is kept; return it, or a copy of the value."""
        part = self._part
        kept = self._copies.handed_out(copy.deepcopy(self._kept))
        if part is None:
            return kept
        if isinstance(part, torch.optim.Optimizer):
            del part.param_groups[len(self._kept["param_groups"]) :]  # were added since
        elif isinstance(part, nn.Module):
            set_buffers(part, self._buffers)
        return loaded(part, kept, self._copies.was_handed_out)


def state_of(part: Any) -> Any:
    """Return the part in the form that is saved and sent."""
    return part.state_dict() if _is_stateful(part) else part


def loaded(part: Any, state: Any, stays: Callable[[Any], bool]) -> Any:
    """Let the part be as `state` says; return it, or a copy of the value.

    Args:
        part: of a state.
        state: is the part's from now on.
        stays: says of a leaf whether it is a tensor that the part is to have itself, not a copy.
    """
    if not _is_stateful(part):
        return copy.deepcopy(state, {id(leaf): leaf for leaf in leaves(state) if stays(leaf)})
    if isinstance(part, nn.Module):
        _load_module(part, state, stays)
        _drop_gradients(part)
    else:
        part.load_state_dict(state)
    return part


def _load_module(module: nn.Module, state: Any, stays: Callable[[Any], bool]) -> None:
    now = module.state_dict(keep_vars=True)
    staying = {
        name
        for name, value in state.items()
        if name in now and stays(value) and (now[name].shape, now[name].dtype) == _kind(value)
    }
    rest = copy.copy(state)  # a state_dict has attributes
    for name in staying:
        now[name].data = rest.pop(name)
    unlike = module.load_state_dict(rest, strict=False)
    if unlike.unexpected_keys or not staying.issuperset(unlike.missing_keys):
        module.load_state_dict(state)  # which says so


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def other_buffers(part: Any, state: Any) -> dict[str, Tensor]:
    """Return the buffers of a model that its ``state_dict``, which is `state`, does not have."""
    if not isinstance(part, nn.Module):
        return {}
    buffers = part.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if name not in state}


def set_buffers(part: Any, buffers: dict[str, Tensor]) -> None:
    """Give a model's buffers these values."""
    with torch.no_grad():
        for name, value in buffers.items():
            owner_name, _, last = name.rpartition(".")
            owner = part.get_submodule(owner_name)
            now = getattr(owner, last, None)
            if isinstance(now, Tensor) and (now.shape, now.dtype) == (value.shape, value.dtype):
                now.copy_(value)
            else:
                setattr(owner, last, value.clone())


def _drop_gradients(module: nn.Module) -> None:
    """Forget what a step has added up that was not completed: the next one would add to it."""
    for parameter in module.parameters():
        parameter.grad = None


def _is_stateful(part: object) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")

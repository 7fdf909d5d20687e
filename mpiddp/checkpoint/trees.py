"""Walk what is nested in a state: dicts, lists and tuples, with leaves such as tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Copier", "leaves", "map_leaves"]


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a copy of `tree` with ``function(leaf)`` for each leaf. Not collective.

    Unlike torch's pytree it keeps the attributes of dicts: a state_dict has ``_metadata``.
    """
    if isinstance(tree, dict):
        mapped = copy.copy(tree)
        for key, value in tree.items():
            mapped[key] = map_leaves(value, function)
        return mapped
    if isinstance(tree, tuple | list):
        parts = [map_leaves(value, function) for value in tree]
        if hasattr(tree, "_fields"):  # a namedtuple
            return type(tree)(*parts)
        return type(tree)(parts)
    return function(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of `tree`, in the order of `map_leaves`. Not collective."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        yield tree
        return
    for value in tree:
        yield from leaves(value)


class Copier:
    """Copies states. The last copy's memory is used again: fresh pages cost as much as copying."""

    def __init__(self) -> None:
        self._last: list[Any] = []

    def copied(self, tree: Any) -> Any:
        """Return a copy of `tree` that later steps do not change; the next call does.

        Not collective. Plain tensors are copied to host memory; shards stay on their device. What
        occurs twice, such as a shared weight, is copied once.
        """
        copies: dict[int, Any] = {}
        spares = iter(self._last)

        def copied_leaf(leaf: Any) -> Any:
            if id(leaf) not in copies:
                copies[id(leaf)] = _copy(leaf, next(spares, None))
            return copies[id(leaf)]

        with torch.no_grad():
            made = map_leaves(tree, copied_leaf)
        self._last = list(copies.values())
        return made


def _copy(leaf: Any, spare: Any) -> Any:
    if type(leaf) in (Tensor, torch.nn.Parameter):
        fits = (
            type(spare) is Tensor
            and (spare.shape, spare.dtype) == (leaf.shape, leaf.dtype)
            and spare.layout == leaf.layout == torch.strided
        )
        return spare.copy_(leaf) if fits else leaf.detach().to("cpu", copy=True)
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return copy.deepcopy(leaf)

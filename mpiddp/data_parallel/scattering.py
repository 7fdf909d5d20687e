"""Divide a batch among replicas and put their outputs together, by the rules of torch.

These are the rules of torch.nn.parallel.scatter and gather: tensors are cut as `torch.chunk` does,
containers are divided item by item, and everything else goes to each replica.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["gather", "scatter"]


def scatter(
    inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, count: int, dim: int
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Divide the arguments of a call. Not collective; gradients flow back.

    Args:
        inputs: the positional ones: tensors, tuples, named tuples, lists, dicts, anything.
        kwargs: those with names.
        count: the largest number of parts.
        dim: the dimension along which tensors are cut.

    Returns:
        The positional arguments of each part, and the named ones: equally many, at most `count`,
        none if there are no arguments at all.

    Raises:
        RuntimeError: a tensor has no dimension to cut.
    """
    positional = _divide(inputs, count, dim) if inputs else []
    named = _divide(kwargs, count, dim) if kwargs else []
    parts = max(len(positional), len(named))
    if positional and named and len(positional) != len(named):
        # torch calls the last replicas without the arguments that are cut.
        longer = kwargs if len(named) > len(positional) else inputs
        if not _has_tensors(longer):
            parts = min(len(positional), len(named))
            positional, named = positional[:parts], named[:parts]
    positional += [()] * (parts - len(positional))
    named += [{} for _ in range(parts - len(named))]
    return tuple(positional), tuple(named)


def gather(outputs: Sequence[Any], dim: int, device: torch.device | None = None) -> Any:
    """Put the outputs of replicas together. Not collective; gradients flow back.

    Args:
        outputs: of each replica, with the same structure: tensors in any containers, or None.
        dim: the dimension along which tensors are joined. Scalars become a vector if it is 0.
        device: where the result goes; None leaves it on the first replica's device.

    Raises:
        TypeError: an output is neither a tensor, nor a container of tensors, nor None.
        ValueError: the replicas returned dicts of different sizes.
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return _join(outputs, dim, device)
    if first is None:
        return None
    kind: Any = type(first)
    if isinstance(first, dict):
        if any(len(output) != len(first) for output in outputs):
            raise ValueError("the replicas of DataParallel returned dicts of different sizes")
        return kind((key, gather([one[key] for one in outputs], dim, device)) for key in first)
    if not isinstance(first, Sequence) or isinstance(first, str | bytes):
        raise TypeError(
            f"a module in DataParallel must return tensors, or containers of tensors, to be "
            f"joined; it returned {kind.__name__}"
        )
    if any(len(output) != len(first) for output in outputs):
        raise ValueError(
            f"the replicas of DataParallel returned {kind.__name__}s of different lengths"
        )
    joined = [gather(column, dim, device) for column in zip(*outputs, strict=True)]
    return kind._make(joined) if _is_named_tuple(first) else kind(joined)


def _divide(obj: Any, count: int, dim: int) -> list[Any]:
    """Return the parts of an object, as many as the tensor in it with the fewest has."""
    if isinstance(obj, torch.Tensor):
        return _cut(obj, count, dim)
    if _is_named_tuple(obj):
        return [type(obj)(*part) for part in _each(obj, count, dim)]
    if isinstance(obj, tuple) and obj:
        return list(_each(obj, count, dim))
    if isinstance(obj, list) and obj:
        return [list(part) for part in _each(obj, count, dim)]
    if isinstance(obj, dict) and obj:
        kind: Callable[[Any], Any] = type(obj)
        return [kind(part) for part in _each(obj.items(), count, dim)]
    return [obj for _ in range(count)]


def _each(items: Any, count: int, dim: int) -> Any:
    return zip(*(_divide(item, count, dim) for item in items), strict=False)


def _has_tensors(obj: Any) -> bool:
    if isinstance(obj, dict):
        return any(map(_has_tensors, obj.values()))
    if isinstance(obj, list | tuple):
        return any(map(_has_tensors, obj))
    return isinstance(obj, torch.Tensor)


def _cut(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    parts = list(tensor.chunk(count, dim))
    if tensor.requires_grad and torch.is_grad_enabled():
        # The module may write into its input, which autograd forbids for one of several views.
        parts[0] = parts[0].clone()
    return parts


def _join(outputs: Sequence[torch.Tensor], dim: int, device: torch.device | None) -> torch.Tensor:
    if device is not None:
        outputs = [output.to(device) for output in outputs]
    if dim == 0 and all(output.dim() == 0 for output in outputs):
        warnings.warn(
            "the module in DataParallel returned a scalar on each rank; they are joined to a "
            "vector with one element a rank",
            stacklevel=4,
        )
        return torch.stack(list(outputs))
    return torch.cat(list(outputs), dim)


def _is_named_tuple(obj: object) -> bool:
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")

"""The shorter forms in which torch's process groups can be called, such as ``allreduce(tensor)``.

torch.distributed hands lists of tensors and an object with options to a group; torch itself also
calls groups with one tensor and single options in Python, which C++ tells by their types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["also_called_with"]

Method = TypeVar("Method", bound=Callable[..., Any])

# What a single option is called in the object with options.
_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def also_called_with(options: type, *names: str, tensors: int = 1) -> Callable[[Method], Method]:
    """Return what lets a method be called with single options too, and with single tensors.

    Not collective.

    Args:
        options: the class of the object with options that the method takes last.
        names: of the single options, in their order: "op", "root" or "timeout".
        tensors: how many arguments come before the options; more than two are never lists.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            # As torch.distributed calls it.
            if len(args) > tensors and isinstance(args[tensors], options):
                return method(self, *args, **kwargs)
            single = dict(zip(names, args[tensors:], strict=False))
            single.update((name, kwargs.pop(name)) for name in names if name in kwargs)
            made = kwargs.setdefault("opts", options())
            for name, value in single.items():
                if value is not None:
                    setattr(made, _FIELDS[name], value)
            given = args[:tensors]
            return method(self, *(_as_lists(given) if tensors < 3 else given), **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _as_lists(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put what goes with a single tensor into lists of one; an empty list stays: no tensors."""
    if not any(isinstance(each, torch.Tensor) for each in given):
        return given
    return tuple([each] if isinstance(each, torch.Tensor) or each else each for each in given)

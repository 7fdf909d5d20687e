"""The shorter forms in which torch's process groups can be called, such as ``allreduce(tensor)``.

torch.distributed calls a group with lists of tensors and an object with options. Python code of
torch's also passes one tensor and single options, which C++ tells apart by their types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["also_called_with"]

Method = TypeVar("Method", bound=Callable[..., Any])

# The name of each single option in the object with options.
_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def also_called_with(options: type, *names: str, tensors: int = 1) -> Callable[[Method], Method]:
    """Return a decorator with which a method also takes single options and single tensors.

    Not collective.

    Args:
        options: the class of the object with options that the method takes last.
        names: of the single options, in their order: "op", "root" or "timeout".
        tensors: how many arguments come before the options; three or more are never made lists.
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
    """If one argument is a single tensor, put each in a list; an empty list stays as it is."""
    if not any(isinstance(each, torch.Tensor) for each in given):
        return given
    return tuple([each] if isinstance(each, torch.Tensor) or each else each for each in given)

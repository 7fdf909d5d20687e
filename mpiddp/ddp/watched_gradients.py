"""Notice that Python reads the gradient of a parameter, which may be a mean only in parts.

`Parameter.grad` is a property of ours while any gradients are watched. Autograd and what runs in a
backward do not go through it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["Watcher", "can_watch", "gradient_of", "set_gradient", "unwatch", "unwatched", "watch"]

_plain: Any = torch.Tensor.grad
# What torch's own attribute does, without a look at who watches.
gradient_of = _plain.__get__
set_gradient = _plain.__set__


class Watcher(Protocol):
    """Answers for gradients that are read."""

    def read(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return what a reader of the gradient of this parameter gets. Not collective."""

    def note_whole(self, indices: Sequence[int]) -> None:
        """Note that these parameters have no gradient any more. Not collective."""


_watched: dict[int, tuple[weakref.ref[Any], int]] = {}
_paused = 0


def can_watch(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether all of them are of torch's class, or derive from it. Not collective."""
    return all(isinstance(parameter, torch.nn.Parameter) for parameter in parameters) and all(
        getattr(type(parameter), "grad", None) in (_plain, _property) for parameter in parameters
    )


def watch(watcher: Watcher, parameters: Sequence[torch.Tensor]) -> None:
    """Let a watcher answer for the gradients of its parameters. Not collective."""
    _install()
    reference = weakref.ref(watcher)
    keys = [id(parameter) for parameter in parameters]
    if not any(key in _watched for key in keys):
        weakref.finalize(watcher, _forget, keys).atexit = False
    _watched.update((key, (reference, index)) for index, key in enumerate(keys))
    torch.nn.Parameter.grad = _property  # type: ignore[assignment]


@functools.cache
def _install() -> None:
    """Let `zero_grad` of modules be no reading. Once a process."""
    module: Any = torch.nn.Module
    zero_grad = module.zero_grad

    @functools.wraps(zero_grad)
    def zero(self: torch.nn.Module, set_to_none: bool = True) -> None:
        for parameter in self.parameters() if _watched else ():
            _note_whole(parameter)  # before it is zeroed
        with unwatched():
            zero_grad(self, set_to_none)

    module.zero_grad = zero


def _note_whole(parameter: Any) -> None:
    found = _watched.get(id(parameter))
    watcher = None if found is None else found[0]()
    if found is not None and watcher is not None:
        watcher.note_whole([found[1]])


def unwatch(parameters: Sequence[torch.Tensor]) -> None:
    """Let nobody answer for them any more. Not collective."""
    _forget([id(parameter) for parameter in parameters])


def _forget(keys: Sequence[int]) -> None:
    for key in keys:
        _watched.pop(key, None)
    if not _watched and "grad" in vars(torch.nn.Parameter):
        del torch.nn.Parameter.grad


class unwatched:  # as a function
    """Read gradients as they are in this context, as our own code does. Not collective."""

    def __enter__(self) -> None:
        global _paused
        _paused += 1

    def __exit__(self, *error: object) -> None:
        global _paused
        _paused -= 1


def _read(parameter: Any) -> Any:
    gradient = gradient_of(parameter)
    if gradient is None or _paused:
        return gradient
    found = _watched.get(id(parameter))
    # What autograd's hooks see is this rank's own gradient, as in torch's class.
    if found is None or torch._C._current_graph_task_id() != -1 or torch.compiler.is_compiling():
        return gradient
    watcher = found[0]()
    # Dynamo looks at all of a parameter that it meets. What compiled code reads it reads later.
    reader = str(sys._getframe(1).f_globals.get("__name__"))
    if watcher is None or reader.startswith(("torch._dynamo.", "torch._subclasses.")):
        return gradient
    return watcher.read(found[1], gradient)


def _write(parameter: Any, gradient: Any) -> None:
    if gradient is None:
        _note_whole(parameter)
    set_gradient(parameter, gradient)


def _delete(parameter: Any) -> None:
    _write(parameter, None)


_property = property(_read, _write, _delete, _plain.__doc__)

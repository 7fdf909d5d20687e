"""Refuse parameters to who reads them without their wrapper after a step that failed.

Some ranks of the node have stepped their part and others have not. From then on whoever asks a
module for such a parameter gets an error: the forward of any module that has one,
`Module.named_parameters` (and so `parameters`), attributes of modules, copies and pickles of
parameters. A tensor that somebody kept cannot be taken away. Nothing of torch is replaced before a
step has failed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from mpiddp.torch_internals.compiler import skip_compilation

__all__ = ["Owner", "allow", "refuse"]


class Owner(Protocol):
    """Says why parameters may not be read."""

    def check(self) -> None:
        """Raise RuntimeError. Not collective."""


_refused: dict[int, weakref.ref[Owner]] = {}
# Of the hook of all modules, as long as some parameters are refused.
_hooks: list[Any] = []


def refuse(owner: Owner, parameters: Sequence[torch.Tensor]) -> None:
    """Let readers of these parameters get the owner's error from now on. Not collective."""
    _install()
    if not _hooks:
        _hooks.append(register_module_forward_pre_hook(_before_forward))
    keys = [id(parameter) for parameter in parameters]
    reference = weakref.ref(owner)
    _refused.update((key, reference) for key in keys)
    weakref.finalize(owner, _forget, keys).atexit = False


def allow(parameters: Sequence[torch.Tensor]) -> None:
    """Let readers have these parameters again. Not collective."""
    _forget([id(parameter) for parameter in parameters])


def _forget(keys: Sequence[int]) -> None:
    for key in keys:
        _refused.pop(key, None)
    if not _refused:
        while _hooks:
            _hooks.pop().remove()


def _check(parameter: object) -> None:
    found = _refused.get(id(parameter))
    owner = None if found is None else found()
    if owner is not None:
        owner.check()


@skip_compilation  # type: ignore[type-var]
def _before_forward(module: torch.nn.Module, *arguments: Any) -> None:
    for parameter in module._parameters.values():
        _check(parameter)


@functools.cache
def _install() -> None:
    """Replace the functions of torch that read parameters by ones that look. Once a process."""
    module: Any = torch.nn.Module
    named_parameters: Callable[..., Iterator[Any]] = module.named_parameters
    attribute: Callable[[Any, str], Any] = module.__getattr__

    def checked(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for name, parameter in named_parameters(self, *args, **kwargs):
            _check(parameter)
            yield name, parameter

    def checked_attribute(self: Any, name: str) -> Any:
        found = attribute(self, name)
        _check(found)
        return found

    checked.__doc__ = named_parameters.__doc__
    module.named_parameters = checked
    module.__getattr__ = checked_attribute
    for name in ("__deepcopy__", "__reduce_ex__"):
        setattr(torch.nn.Parameter, name, _checking_first(getattr(torch.nn.Parameter, name)))


def _checking_first(method: Callable[..., Any]) -> Callable[..., Any]:
    def first_check(self: Any, argument: Any) -> Any:
        _check(self)
        return method(self, argument)

    return first_check

"""Let who reads parameters without their wrapper wait for the optimizer's step of the other ranks.

A rank that has stepped its part of the parameters that a node shares goes on before the others have
stepped theirs. Until then, what reads parameters waits: the forward of any module,
`Module.named_parameters` (and so `parameters`), and copies and pickles of parameters. A tensor that
somebody kept cannot be made to wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from mpiddp.torch_internals.compiler import skip_compilation

__all__ = ["Waiter", "begin", "end"]


class Waiter(Protocol):
    """What waits for a step."""

    def wait(self) -> None:
        """Return when the step is over; call `end`. Not collective."""


_under_way: list[weakref.ref[Waiter]] = []
_hook: RemovableHandle | None = None
_installed = False


def begin(waiter: Waiter) -> None:
    """Let readers wait from now on. Not collective."""
    global _hook
    _install()
    _under_way.append(weakref.ref(waiter, _forget))
    if _hook is None:
        _hook = register_module_forward_pre_hook(_before_forward)


def end(waiter: Waiter) -> None:
    """Let them not wait any more. Not collective."""
    for reference in _under_way[:]:
        if reference() is waiter:
            _forget(reference)


def _forget(reference: weakref.ref[Waiter]) -> None:
    global _hook
    if reference in _under_way:
        _under_way.remove(reference)
    if not _under_way and _hook is not None:
        _hook.remove()
        _hook = None


def _wait() -> None:
    for reference in _under_way[:]:
        waiter = reference()
        if waiter is not None:
            waiter.wait()


@skip_compilation  # type: ignore[type-var]
def _before_forward(*arguments: Any) -> None:
    _wait()


def _install() -> None:
    """Replace the functions of torch that read parameters by ones that wait. Once a process."""
    global _installed
    if _installed:
        return
    _installed = True
    module: Any = torch.nn.Module
    named_parameters: Callable[..., Iterator[Any]] = module.named_parameters

    def waiting(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if _under_way:
            _wait()
        return named_parameters(self, *args, **kwargs)

    waiting.__doc__ = named_parameters.__doc__
    module.named_parameters = waiting
    for name in ("__deepcopy__", "__reduce_ex__"):
        setattr(torch.nn.Parameter, name, _waiting_first(getattr(torch.nn.Parameter, name)))


def _waiting_first(method: Callable[..., Any]) -> Callable[..., Any]:
    def first_wait(self: Any, argument: Any) -> Any:
        if _under_way:
            _wait()
        return method(self, argument)

    return first_wait

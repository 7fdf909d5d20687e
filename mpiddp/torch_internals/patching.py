"""Replace a function of torch by one of ours, for everyone who holds it.

Note [Functions held by name]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``from torch.distributed import init_process_group`` may run before ``import mpiddp``, and then a
new value for ``torch.distributed.init_process_group`` does not reach that importer. torch's
functions of this kind are decorated (with its loggers), so what callers hold is a small wrapper
that keeps the function in a closure. Changing it there reaches them all.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["replace_function"]

Function = Callable[..., Any]


def replace_function(held: Function, make: Callable[[Function], Function]) -> None:
    """Let every call of `held` reach ``make(inner)`` instead of what it reaches now, `inner`.

    May be applied several times; the last is called first. Not collective.

    Args:
        held: a decorated function of torch, or a plain one, which is replaced only in modules
            that are loaded already.
        make: takes the function that is replaced and returns the one to call.
    """
    cell = _cell_of_wrapped(held)
    if cell is not None:
        inner = cell.cell_contents
        cell.cell_contents = functools.wraps(inner)(make(inner))
        return
    ours = functools.wraps(held)(make(held))
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is held]:
            setattr(module, name, ours)


def _cell_of_wrapped(held: Function) -> Any:
    """Return the closure's cell in which a decorator keeps the function that it calls."""
    if not inspect.isfunction(held) or not hasattr(held, "__wrapped__"):
        return None
    for cell in held.__closure__ or ():
        value = cell.cell_contents
        if value is held.__wrapped__ or getattr(value, "__wrapped__", None) is held.__wrapped__:
            return cell
    return None

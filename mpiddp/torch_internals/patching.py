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
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["replace_function", "when_imported"]

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


def when_imported(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call ``change(module)`` once the module is imported, at once if it is. Not collective.

    So a module of torch that few programs use, and that takes long to import, is not imported for
    all. A name that this torch does not have is never imported.
    """
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watching(name, change))


class _Watching(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module as the other finders do, and changes it after it has run."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change
        self._loader: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        # From here on it is an ordinary module of its own loader.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._change(module)

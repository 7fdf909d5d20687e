"""Keep torch from importing its compiler for a program that compiles nothing.

Note [The compiler is imported late]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch._dynamo is more than 800 modules: a second of processor time on each rank, and thousands of
files of which a shared filesystem is asked. torch imports it in programs that compile nothing. The
constructor of DistributedDataParallel asks for a setting that nobody can have changed before the
import. Methods of it and of optimizers are excluded from compilation, and `step` of each optimizer
marks where graphs end, which both mean nothing as long as there is no compiler. As soon as
something imports it, all of that is as torch has made it.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo
from torch.nn.parallel.distributed import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

__all__ = ["compiler_not_asked", "disable_compilation"]

Function = TypeVar("Function", bound=Callable[..., Any])

COMPILER = "torch._dynamo"
# What `torch._dynamo.utils.get_optimize_ddp_mode()` returns if no program has changed it.
OPTIMIZE_DDP_MODE = "ddp_optimizer"
# Where torch keeps, on a function, the version of it that is excluded from compilation.
_DISABLED = "__dynamo_disable"

_lock = threading.Lock()
_within = 0


class _NotImported(types.ModuleType):
    """What torch finds in the place of a module: known answers. Anything else imports it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def _optimize_ddp_mode() -> str:
    utils: Any = sys.modules.get(f"{COMPILER}.utils")  # another thread may import it meanwhile
    mode: str = OPTIMIZE_DDP_MODE if utils is None else utils.get_optimize_ddp_mode()
    return mode


def _stand_in() -> _NotImported:
    utils = _NotImported(f"{COMPILER}.utils")
    vars(utils)["get_optimize_ddp_mode"] = _optimize_ddp_mode
    compiler = _NotImported(COMPILER)
    vars(compiler)["utils"] = utils
    return compiler


_STAND_IN = _stand_in()


@contextmanager
def compiler_not_asked() -> Iterator[None]:
    """Within, torch learns how to optimise DistributedDataParallel without an import.

    Not collective. See Note [The compiler is imported late].
    """
    global _within
    with _lock:
        if COMPILER not in sys.modules:
            vars(torch)["_dynamo"] = _STAND_IN  # an import puts the module itself there
        _within += 1
    try:
        yield
    finally:
        with _lock:
            _within -= 1
            if not _within and vars(torch).get("_dynamo") is _STAND_IN:
                del vars(torch)["_dynamo"]


class _BeforeTheImport(MetaPathFinder):
    """Undoes what was done here as soon as the compiler is looked for."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], object]] = []
        self.waits = COMPILER not in sys.modules
        if self.waits:
            sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Find nothing, and see what is looked for."""
        if fullname == COMPILER and self.waits:
            self.waits = False
            for undo in self.undo:
                undo()
            sys.meta_path.remove(self)


_before_the_import = _BeforeTheImport()


def _put_off(excluded: Callable[..., Any]) -> None:
    """Let what `torch._disable_dynamo` has returned import no compiler as long as there is none."""
    inner: Any = excluded
    while inner.__code__.co_name != "inner":
        if not hasattr(inner, "__wrapped__"):
            return  # a newer torch, which excludes it in another way
        inner = inner.__wrapped__
    if _before_the_import.waits:
        function = inner.__wrapped__
        setattr(function, _DISABLED, function)
        _before_the_import.undo.append(functools.partial(vars(function).pop, _DISABLED, None))


def _plainly(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return what torch's optimizers do around `step`, without marks for a compiler."""

    def step(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(args[0].defaults["differentiable"])
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return step


_PLAIN = cast("types.FunctionType", _plainly(print)).__code__


def _put_off_in_step(optimizer: type[Optimizer]) -> None:
    """Let an optimizer's `step` import no compiler as long as there is none."""
    step: Any = vars(optimizer).get("step")
    code = getattr(step, "__code__", None)
    if code is None or code.co_name != "_use_grad" or code.co_freevars != _PLAIN.co_freevars:
        return
    if _before_the_import.waits:
        step.__code__ = _PLAIN
        _before_the_import.undo.append(functools.partial(setattr, step, "__code__", code))


def disable_compilation(function: Function) -> Function:
    """Exclude a function and all it calls from torch.compile, as `torch.compiler.disable` does.

    Not collective. It imports no compiler.
    """
    excluded: Any = _disable_dynamo(function)
    _put_off(excluded)
    return excluded  # type: ignore[no-any-return]


for _excluded in (
    DistributedDataParallel._inside_ddp_forward,
    Optimizer.add_param_group,
    Optimizer.load_state_dict,
    Optimizer.state_dict,
    Optimizer.zero_grad,
    checkpoint,
):
    _put_off(_excluded)
for _optimizer in Optimizer.__subclasses__():
    _put_off_in_step(_optimizer)

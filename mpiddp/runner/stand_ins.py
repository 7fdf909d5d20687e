"""Modules of mpiddp in the place of packages that are not installed.

A script that imports one of them runs as it is. What is installed comes first: the finder is asked
for a module only after all others. `importlib.util.find_spec`, by which libraries ask whether they
may use a package, finds Horovod's. It does not find that of which there is a part only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mpiddp.runner import horovod_run, torch_ccl
from mpiddp.torch_internals.backend_names import CCL_MODULES

if TYPE_CHECKING:
    from mpiddp.runner.started_ranks import StartedRanks

__all__ = ["STAND_INS", "install"]

# The module that a script imports, and ours. "": a package for the modules in it, empty itself.
STAND_INS: Mapping[str, str] = {
    "apex": "",
    "apex.parallel": "mpiddp.apex",
    "horovod": "mpiddp.runner.horovod_run",
    "horovod.common": "",
    "horovod.common.elastic": "mpiddp.horovod.object_state",
    "horovod.common.exceptions": "mpiddp.horovod.errors",
    "horovod.common.process_sets": "mpiddp.horovod.process_sets",
    "horovod.common.util": "mpiddp.horovod.util",
    "horovod.runner": "mpiddp.runner.horovod_run",
    "horovod.torch": "mpiddp.horovod",
    "horovod.torch.compression": "mpiddp.horovod.compression",
    "horovod.torch.elastic": "mpiddp.horovod.elastic",
    "horovod.torch.elastic.sampler": "mpiddp.horovod.elastic",
    "horovod.torch.elastic.state": "mpiddp.horovod.elastic",
    "horovod.torch.functions": "mpiddp.horovod.functions",
    "horovod.torch.mpi_ops": "mpiddp.horovod.mpi_ops",
    "horovod.torch.optimizer": "mpiddp.horovod.optimizer",
    "horovod.torch.sync_batch_norm": "mpiddp.horovod.sync_batch_norm",
    **dict.fromkeys(CCL_MODULES, "mpiddp.runner.torch_ccl"),
}

# What holds a part of the package only, so that libraries must not take it for the whole.
_PARTS_ONLY = ("apex",)


def install(rank: int, started: StartedRanks | None = None) -> None:
    """Let scripts import the stand-ins from now on. Not collective.

    Args:
        rank: this process's; rank 0 says which stand-in was imported, on stderr, and of Horovod
            that it has begun.
        started: what `horovod.run` calls its function on.
    """
    if started is not None:
        horovod_run.use(started)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder(rank))


class _Finder(DistributionFinder):
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in STAND_INS or (fullname in _PARTS_ONLY and _is_only_a_question()):
            return None
        if fullname in CCL_MODULES:
            if torch_ccl.is_asked_by_deepspeed():
                return None
            torch_ccl.tell_deepspeed()
        is_package = any(other.startswith(f"{fullname}.") for other in STAND_INS)
        loader = _Loader(self._rank)
        return ModuleSpec(fullname, loader, origin="mpiddp", is_package=is_package)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """Return what `importlib.metadata` knows of a stand-in."""
        return torch_ccl.distributions(None if context is None else context.name)


class _Loader(Loader):
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def exec_module(self, module: ModuleType) -> None:
        """Give the module the public names of ours."""
        name = module.__name__
        if any(other.startswith(f"{name}.") for other in STAND_INS):
            module.__dict__["__getattr__"] = _attributes_of_package(name)
        if not STAND_INS[name]:
            return
        ours = importlib.import_module(STAND_INS[name])
        module.__doc__ = ours.__doc__
        module.__dict__["__all__"] = list(ours.__all__)
        for key in ours.__all__:
            if f"{name}.{key}" not in STAND_INS:  # else it is imported when it is asked for
                module.__dict__[key] = getattr(ours, key)
        if self._rank != 0:
            return
        if name.startswith("horovod."):  # said by who uses it: many import it to see whether it is
            if "init" in ours.__all__:
                module.__dict__["init"] = _say_first(ours.init)
        elif name in CCL_MODULES:
            _say(name, "mpiddp")
        elif "." in name:  # of a package, its parts are what counts
            _say(name, ours.__name__)


def _say(name: str, ours: str) -> None:
    print(f"mpiddp: there is no {name}; {ours} stands in for it", file=sys.stderr, flush=True)


@functools.cache  # two modules have it, and the program may hold either
def _say_first(init: Callable[..., None]) -> Callable[..., None]:
    """Return Horovod's `init`, which says once a process what stands in. Not collective."""
    said = False

    @functools.wraps(init)
    def saying(*args: Any, **kwargs: Any) -> None:
        nonlocal said
        if not said:
            said = True
            _say("horovod.torch", "mpiddp.horovod")
        init(*args, **kwargs)

    return saying


def _attributes_of_package(package: str) -> Any:
    """Return what `package` answers for names that it does not have: its parts, at first."""

    def attribute(name: str) -> Any:
        if f"{package}.{name}" in STAND_INS:
            return importlib.import_module(f"{package}.{name}")
        parts = ", ".join(one for one in STAND_INS if one.startswith(f"{package}."))
        raise AttributeError(
            f"module {package!r} has no attribute {name!r}: {package} is not installed, and mpiddp "
            f"stands in only for {parts}"
        )

    return attribute


def _is_only_a_question() -> bool:
    """Whether `importlib.util.find_spec` asks the finder, and not an import."""
    # This function, the finder, importlib's loop over the finders, and who called that.
    asking = sys._getframe(3).f_globals.get("__name__")
    return asking == importlib.util.__name__

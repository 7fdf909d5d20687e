"""Modules of mpiddp in the place of packages that are not installed.

A script that imports one of them runs as it is. What is installed comes first: the finder is asked
for a module only after all others. It does not answer `importlib.util.find_spec` for a whole
package, by which libraries ask whether they may use all of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["STAND_INS", "install"]

# The module that a script imports, and ours. "": a package for the modules in it, empty itself.
STAND_INS: Mapping[str, str] = {
    "apex": "",
    "apex.parallel": "mpiddp.apex",
    "horovod": "",
    "horovod.common": "",
    "horovod.common.exceptions": "mpiddp.horovod.errors",
    "horovod.common.process_sets": "mpiddp.horovod.process_sets",
    "horovod.torch": "mpiddp.horovod",
    "horovod.torch.compression": "mpiddp.horovod.compression",
    "horovod.torch.elastic": "mpiddp.horovod.elastic",
    "horovod.torch.functions": "mpiddp.horovod",
    "horovod.torch.mpi_ops": "mpiddp.horovod",
    "horovod.torch.optimizer": "mpiddp.horovod",
    "horovod.torch.sync_batch_norm": "mpiddp.horovod.sync_batch_norm",
}


def install(rank: int) -> None:
    """Let scripts import the stand-ins from now on. Not collective.

    Args:
        rank: this process's; rank 0 says which stand-in was imported, on stderr.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder(rank))


class _Finder(MetaPathFinder):
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in STAND_INS or (not STAND_INS[fullname] and _is_only_a_question()):
            return None
        is_package = any(other.startswith(f"{fullname}.") for other in STAND_INS)
        loader = _Loader(self._rank)
        return ModuleSpec(fullname, loader, origin="mpiddp", is_package=is_package)


class _Loader(Loader):
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def exec_module(self, module: ModuleType) -> None:
        """Give the module the public names of ours."""
        name = module.__name__
        if not STAND_INS[name]:
            module.__dict__["__getattr__"] = _attributes_of_package(name)
            return
        ours = importlib.import_module(STAND_INS[name])
        module.__doc__ = ours.__doc__
        public = {key: getattr(ours, key) for key in ours.__all__}
        module.__dict__.update(public, __all__=list(public))
        if self._rank == 0:
            print(
                f"mpiddp: there is no {name}; {ours.__name__} stands in for it",
                file=sys.stderr,
                flush=True,
            )


def _attributes_of_package(package: str) -> Any:
    """Return what `package`, which is empty, answers for names that it does not have."""

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

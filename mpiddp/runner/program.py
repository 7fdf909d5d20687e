"""Run a script, a module or a string of code as __main__, as `python` itself would."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import sys
import zipfile
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, TracebackType

__all__ = ["Program", "without_own_frames"]

_HERE = os.path.dirname(__file__)
_OWN_FILES = (
    __file__,
    *(os.path.join(_HERE, f"{name}.py") for name in ("command", "elastic", "spawn")),
    os.path.join(_HERE, "started_ranks.py"),
    os.path.join(os.path.dirname(_HERE), "__main__.py"),
)


@dataclass(frozen=True)
class Program:
    """What the user wants to run.

    Attributes:
        kind: "script", "module" (python -m) or "code" (python -c).
        name: path of the script, name of the module, or the code.
        arguments: what comes after it on the command line.
    """

    kind: str
    name: str
    arguments: tuple[str, ...]

    def run(self) -> None:
        """Run it in a new module __main__, which stays. Not collective by itself.

        Raises:
            FileNotFoundError: there is no such script.
            ImportError: there is no such module, or none that can be run.
        """
        if self.kind == "code":
            self._set_path("")
            sys.argv = ["-c", *self.arguments]
            module = _new_main(None, None)
            code = compile(self.name, "<string>", "exec", dont_inherit=True)
        elif self.kind == "module":
            # Until the module is found, as with `python -m`. The console command has not put
            # the working directory there.
            self._set_path(os.getcwd())
            sys.argv = ["-m", *self.arguments]
            module, code = _load_module(_find_module(self.name))
            sys.argv = [str(module.__file__), *self.arguments]
        elif os.path.isdir(self.name) or zipfile.is_zipfile(self.name):
            path = os.path.abspath(self.name)
            self._set_path(path)
            sys.argv = [self.name, *self.arguments]
            spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
            if spec is None:
                raise ImportError(f"can't find '__main__' module in {self.name!r}")
            module, code = _load_module(spec)
        else:
            self._set_path(os.path.dirname(os.path.realpath(self.name)))
            sys.argv = [self.name, *self.arguments]
            path = os.path.abspath(self.name)
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            code = loader.source_to_code(loader.get_data(path), path)
            module = _new_main(None, loader)
            module.__file__ = path
        sys.modules["__main__"] = module
        exec(code, module.__dict__)  # noqa: S102  # the user's program

    def _set_path(self, first: str) -> None:
        # Under `python -P` (Python 3.11) nobody put the working directory there.
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = first


def without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of `traceback` that lies in the user's program, or None."""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if name not in _OWN_FILES and not name.startswith("<frozen "):
            return traceback
        traceback = traceback.tb_next
    return None


def _new_main(spec: ModuleSpec | None, loader: object) -> ModuleType:
    module = ModuleType("__main__")
    module.__spec__ = spec
    module.__loader__ = loader  # type: ignore[assignment]  # as Python itself sets it
    module.__package__ = None if spec is None else spec.parent
    module.__dict__["__builtins__"] = builtins
    if loader is None:
        module.__loader__ = importlib.machinery.BuiltinImporter  # so `python -c` has it
    else:
        module.__dict__["__cached__"] = None if spec is None else spec.cached
    return module


def _find_module(name: str) -> ModuleSpec:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None:
        raise ImportError(f"No module named {name}, or a package without a module __main__")
    return spec


def _load_module(spec: ModuleSpec) -> tuple[ModuleType, CodeType]:
    code = getattr(spec.loader, "get_code", lambda name: None)(spec.name)
    if code is None:
        raise ImportError(f"No code object available for {spec.name}")
    module = _new_main(spec, spec.loader)
    module.__file__ = spec.origin
    return module, code

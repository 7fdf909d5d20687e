"""Refuse to run on another MPI than this build can work with.

mpi4py's wheels choose their MPI when they are imported, by what they find; our extension modules
were compiled against one. Two MPIs in a process end in a crash.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def check_loaded_library() -> None:
    """Raise ImportError if mpi4py has loaded, or would load, another MPI.

    Not collective, and does not initialise MPI. Vendor and major version must agree: within
    these, MPI libraries keep their binary interface.
    """
    from mpiddp.mpi.library import compiled_against

    vendor, version = compiled_against()
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None:
        other, numbers = loaded.get_vendor()
        if (other, str(numbers[0])) != (vendor, version.split(".")[0]):
            _refuse(f"{vendor} {version}", f"{other} {'.'.join(map(str, numbers))}")
        return
    family = _family_to_load()
    ours = "openmpi" if vendor == "Open MPI" else "mpich"
    if family is not None and family != ours:
        _refuse(f"{vendor} {version}", f"an MPI with the interface of {family}")


def _family_to_load() -> str | None:
    """Return which family of MPIs mpi4py's wheel would load, None if it is fixed."""
    try:
        selection: Any = importlib.import_module("mpi4py._mpiabi")
    except ImportError:
        return None
    if "mpi4py.MPI" not in selection._registry:
        return None
    try:
        return str(selection._get_mpiabi())
    except RuntimeError as error:
        raise ImportError(f"mpi4py finds no MPI library to load: {error}") from error


def _refuse(ours: str, theirs: str) -> None:
    raise ImportError(
        f"mpiddp was compiled against {ours}, but mpi4py runs on {theirs}. Compile it against "
        f"that MPI: MPICC=/path/to/its/mpicc {sys.executable} -m pip install --force-reinstall "
        f"--no-deps --no-cache-dir mpiddp (from its source folder: '.' instead of 'mpiddp'). Or "
        f"have mpi4py load {ours}: set MPI4PY_LIBMPI to its libmpi.so."
    )

"""Refuse to run on another MPI, or on another torch, than this build can work with.

mpi4py's wheels choose their MPI when they are imported, by what they find; the
extension modules were compiled against one. Two MPIs in a process end in a crash.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

# What distributed.py overrides or calls of torch's own class.
_WRAPPER_METHODS = (
    "_ddp_init_helper",
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
    "_passing_sync_batchnorm_handle",
)


def check_torch() -> None:
    """Raise ImportError unless torch's wrapper has what distributed.py builds on.

    Not collective.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise ImportError(f"mpiddp needs torch.distributed, which torch {torch.__version__} lacks")
    wrapper = torch.nn.parallel.DistributedDataParallel
    missing = [name for name in _WRAPPER_METHODS if not hasattr(wrapper, name)]
    if "bucket_cap_mb_list" not in inspect.signature(wrapper.__init__).parameters:
        missing.append("bucket_cap_mb_list")  # torch 2.11 brought it
    if missing:
        raise ImportError(
            f"mpiddp needs torch >= 2.11; torch {torch.__version__} has no "
            f"DistributedDataParallel.{', '.join(missing)}"
        )


def check_loaded_library() -> None:
    """Raise ImportError if mpi4py has loaded, or would load, another MPI.

    Not collective, and does not initialise MPI. Vendor and major version must agree: within
    these, MPI libraries keep their binary interface.
    """
    from mpiddp.library import compiled_against

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

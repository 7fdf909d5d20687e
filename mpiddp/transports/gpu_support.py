"""What is known about GPU memory in each MPI library, and what a library says of itself.

Nothing here is proof: `gpu_trial` tries what looks possible before it is used.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from mpiddp.mpi.running_library import Library, identify, mapped_libraries

__all__ = [
    "DEVICE",
    "RING",
    "Library",
    "ask_library",
    "describe_runtime",
    "identify",
    "known_of",
    "mapped_libraries",
    "worth_trying",
]

# The ways that give device memory to MPI, in order of preference: MPI_Iallreduce, or point to
# point messages with the sum on the GPU.
DEVICE = "device"
RING = "ring"


@dataclass(frozen=True)
class Knowledge:
    """What is known of a vendor's libraries from some version on.

    Attributes:
        vendor: as in `Library`.
        since: first version.
        ways: of `DEVICE` and `RING`, those that may work.
        why: a sentence for the user.
        switches: an environment variable and the value that it must have, for CUDA and for ROCm;
            None where there is nothing to switch on. `unless`: the value that switches it off.
    """

    vendor: str
    since: tuple[int, ...]
    ways: tuple[str, ...]
    why: str
    switches: Mapping[str, tuple[str, str]] | None = None
    unless: tuple[str, str] | None = None


# Where two entries of a vendor fit, the last one counts. Sources, with what they say:
# Open MPI: "device pointers is supported in all of the send and receive APIs as well as the
#   blocking collective APIs. Neither the nonblocking collective APIs ..." (FAQ, runcuda, 4.x);
#   5.x: coll/cuda and coll/accelerator intercept blocking reductions only. Ireduce and Iallreduce
#   end in a segmentation fault: github.com/open-mpi/ompi/issues/9845 and 12045, both open.
# MPICH: github.com/pmodels/mpich/wiki, "GPU Support Matrix (3.4.x)": messages and collectives
#   with operations on NVIDIA GPUs, the latter with extra copies: they go through host memory
#   (MPIR_Coll_host_buffer_alloc in its sources). For AMD not before 4. MPIR_CVAR_ENABLE_GPU=0
#   switches it off.
# Cray MPICH: NERSC's and CSCS's documentation: MPICH_GPU_SUPPORT_ENABLED=1, and the GTL library
#   (libmpi_gtl_cuda, libmpi_gtl_hsa) linked; "If either of these are missing, the application
#   will fail", with a segmentation fault.
# MVAPICH2: only its GDR variant, with MV2_USE_CUDA=1 (2.3.x user guide: nonblocking collectives
#   from GPU buffers); MV2_USE_ROCM=1 since 2.3.5. MVAPICH 3 and later, "Plus": MVP_ENABLE_GPU=1.
# ParaStation MPI: its README: PSP_CUDA=1, default 0.
# Intel MPI: its reference for 2021.12: device buffers "by using the Level Zero library or the CUDA
#   library"; before, Level Zero only. I_MPI_OFFLOAD=1 and I_MPI_OFFLOAD_MODE=cuda.
_KNOWN = (
    Knowledge(
        "Open MPI",
        (1, 7),
        (RING,),
        "messages of device memory where it was built for them, but its nonblocking reductions "
        "crash on it",
    ),
    Knowledge("MPICH", (0,), (), "device memory is supported from version 3.4 on"),
    Knowledge(
        "MPICH",
        (3, 4),
        (DEVICE, RING),
        "device memory everywhere, where it was built for it",
        unless=("MPIR_CVAR_ENABLE_GPU", "0"),
    ),
    Knowledge(
        "Cray MPICH",
        (8,),
        (DEVICE, RING),
        "device memory everywhere, with its GTL library",
        {
            "cuda": ("MPICH_GPU_SUPPORT_ENABLED", "1"),
            "hip": ("MPICH_GPU_SUPPORT_ENABLED", "1"),
        },
    ),
    Knowledge(
        "MVAPICH2",
        (2,),
        (DEVICE, RING),
        "device memory everywhere in its GDR variant",
        {"cuda": ("MV2_USE_CUDA", "1"), "hip": ("MV2_USE_ROCM", "1")},
    ),
    Knowledge(
        "MVAPICH",
        (3,),
        (DEVICE, RING),
        "device memory everywhere, where it was built for it",
        unless=("MVP_ENABLE_GPU", "0"),
    ),
    Knowledge(
        "ParaStation MPI",
        (5,),
        (DEVICE, RING),
        "device memory everywhere, where it was built for it",
        {"cuda": ("PSP_CUDA", "1")},
    ),
    Knowledge("Intel MPI", (0,), (), "device memory of CUDA is supported from 2021.12 on"),
    Knowledge(
        "Intel MPI",
        (2021, 12),
        (DEVICE, RING),
        "device memory of CUDA in messages and collectives",
        {"cuda": ("I_MPI_OFFLOAD", "1")},
    ),
)
_UNKNOWN = Knowledge("unknown", (), (DEVICE, RING), "nothing is known of this MPI")

# The GTL library of Cray MPICH for each runtime.
_GTL = {"cuda": "libmpi_gtl_cuda", "hip": "libmpi_gtl_hsa"}

# Functions beyond the standard by which libraries tell what they were built for; they take no
# arguments and return 0 or 1. MPICH has another one, with MPIX_GPU_SUPPORT_CUDA 0 and _HIP 2.
_QUERIES = {
    "cuda": ("MPIX_Query_cuda_support",),
    "hip": ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
}
_GPU_TYPES = {"cuda": 0, "hip": 2}
_KINDS = {"cuda": "cuda", "hip": "rocm"}


def known_of(library: Library) -> Knowledge:
    """Return what is known of a library. Not collective."""
    fitting = [
        entry
        for entry in _KNOWN
        if entry.vendor == library.vendor and entry.since <= library.version
    ]
    return fitting[-1] if fitting else _UNKNOWN


def ask_library(
    prefix: str, find: Callable[[str], Callable[..., int] | None] | None = None
) -> dict[str, bool]:
    """Return what the MPI in this process says of GPU memory, by the name of the source.

    Not collective; MPI must be initialised.

    Args:
        prefix: "cuda" or "hip".
        find: returns a function of the library by its name, None where it has none; for tests.
    """
    find = find or function_of_mpi
    answers = {}
    for name in _QUERIES[prefix]:
        if query := find(name):
            answers[name] = bool(query())
    if query := find("MPIX_GPU_query_support"):
        supported = ctypes.c_int(0)
        if query(ctypes.c_int(_GPU_TYPES[prefix]), ctypes.byref(supported)) == 0:
            answers["MPIX_GPU_query_support"] = bool(supported.value)
    if _KINDS[prefix] in _alloc_kinds():
        # Its absence says nothing: a library may name only what the program asked for.
        answers["mpi_memory_alloc_kinds"] = True
    return answers


def _alloc_kinds() -> list[str]:
    """Return the kinds of memory that MPI-4.1's info names, without their restrictors."""
    from mpi4py import MPI

    info = MPI.COMM_WORLD.Get_info()
    try:
        text = info.Get("mpi_memory_alloc_kinds")
    finally:
        info.Free()
    return [kind.strip().partition(":")[0] for kind in (text or "").split(",")]


def function_of_mpi(name: str) -> Callable[..., int] | None:
    """Return a C function of the MPI library in this process, None if it has none of this name.

    Not collective.
    """
    for path in mapped_libraries("libmpi"):
        # Loaded already, so this only finds it again.
        function = getattr(ctypes.CDLL(path, os.RTLD_LAZY | os.RTLD_NOLOAD), name, None)
        if function is not None:
            return function  # type: ignore[no-any-return]
    return None


def worth_trying(
    library: Library,
    prefix: str,
    answers: Mapping[str, bool],
    *,
    environment: Mapping[str, str] = os.environ,
    mapped: Iterable[str] | None = None,
) -> tuple[tuple[str, ...], str]:
    """Return which of `DEVICE` and `RING` may work, and why these.

    Not collective.

    Args:
        library: the MPI.
        prefix: of the GPU's runtime, "cuda" or "hip".
        answers: of the library's own functions, by their names.
        environment: variables that switch support on or off.
        mapped: names of the libraries in this process, for tests.
    """
    entry = known_of(library)
    if not entry.ways:
        return (), f"{library}: {entry.why}"
    runtime = "ROCm" if prefix == "hip" else "CUDA"
    if answers and not any(answers.values()):
        names = ", ".join(answers)
        return (), f"{library} was built without {runtime} ({names} says no)"
    if entry.switches is not None:
        if prefix not in entry.switches:
            return (), f"{library}: {entry.why}, but not {runtime}"
        name, value = entry.switches[prefix]
        if environment.get(name) != value:
            return (), f"{library}: {entry.why}, but {name}={value} is not set"
    if entry.unless is not None and environment.get(entry.unless[0]) == entry.unless[1]:
        return (), f"{library}: {'='.join(entry.unless)} switches device memory off"
    if library.vendor == "Cray MPICH":
        wanted = _GTL[prefix]
        loaded = mapped_libraries(wanted) if mapped is None else mapped
        if not any(os.path.basename(path).startswith(wanted) for path in loaded):
            return (), f"{library}: {entry.why}, but {wanted} is not loaded"
    if entry is _UNKNOWN and not any(answers.values()):
        return (), f"{entry.why} ({library}), and it does not say that it supports {runtime}"
    return entry.ways, f"{library}: {entry.why}"


def describe_runtime(prefix: str) -> str:
    """Return name and version of the runtime that torch was built with. Not collective."""
    if prefix == "hip":
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}"

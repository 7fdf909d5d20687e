"""What is known of MPIs and GPU memory: vendors told apart, switches, their own answers."""

import ctypes
from collections.abc import Callable

import pytest

from mpiddp.transports.gpu_support import Library, ask_library, identify, known_of, worth_trying

pytestmark = pytest.mark.once

BOTH = ("device", "ring")
VERSIONS = {
    "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11": (
        "Open MPI 5.0.11"
    ),
    "MPICH Version:      4.2.0\nMPICH Release date: Fri Feb  9": "MPICH 4.2.0",
    "MPICH Version:      5.0.2\nMPICH ABI:          17:2:5": "MPICH 5.0.2",
    "MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)\nMPI BUILD INFO": (
        "Cray MPICH 8.1.25.17"
    ),
    "MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date :": "MVAPICH2 2.3.7",
    "MVAPICH2-GDR Version: 2.3.7": "MVAPICH2 2.3.7",
    "MVAPICH Version      :\t3.0\nMVAPICH Release date": "MVAPICH 3.0",
    "MVAPICH-Plus Version : 4.0": "MVAPICH 4.0",
    "Intel(R) MPI Library 2021.12 for Linux* OS\n": "Intel MPI 2021.12",
    "=== ParaStation MPI 5.9.2-1 ===": "ParaStation MPI 5.9.2",
    "ParaStation MPI Version: 5.13.0\nMPICH Version: 4.1.1": "ParaStation MPI 5.13.0",
    "Some MPI 1.0": "unknown",
}


@pytest.mark.parametrize(("text", "library"), VERSIONS.items())
def test_vendors(text: str, library: str) -> None:
    assert str(identify(text)) == library


@pytest.mark.essential
def test_this_mpi_is_known() -> None:
    from mpiddp.mpi.library import compiled_against, linked_version

    vendor, version = compiled_against()
    assert str(identify(linked_version())) == f"{vendor} {version}"


YES = {"MPIX_Query_cuda_support": True}
NO = {"MPIX_Query_cuda_support": False}
GTL = ["/opt/cray/lib/libmpi_gtl_cuda.so.0"]
CASES = [
    # vendor, version, its answer, environment, what to try, a word of the reason
    ("Open MPI", (5, 0, 11), YES, {}, ("ring",), "nonblocking reductions crash"),
    ("Open MPI", (4, 1, 5), YES, {}, ("ring",), "nonblocking reductions crash"),
    ("Open MPI", (5, 0, 11), NO, {}, (), "without CUDA"),
    ("MPICH", (4, 2, 0), YES, {}, BOTH, "built for it"),
    ("MPICH", (4, 2, 0), NO, {}, (), "without CUDA"),
    ("MPICH", (4, 2, 0), YES, {"MPIR_CVAR_ENABLE_GPU": "0"}, (), "MPIR_CVAR_ENABLE_GPU=0"),
    ("MPICH", (3, 2), {}, {}, (), "3.4"),
    ("Cray MPICH", (8, 1), {}, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, BOTH, "GTL"),
    ("Cray MPICH", (8, 1), {}, {}, (), "MPICH_GPU_SUPPORT_ENABLED=1 is not set"),
    ("MVAPICH2", (2, 3, 7), {}, {"MV2_USE_CUDA": "1"}, BOTH, "GDR"),
    ("MVAPICH2", (2, 3, 7), {}, {}, (), "MV2_USE_CUDA=1 is not set"),
    ("MVAPICH", (3, 0), YES, {}, BOTH, "built for it"),
    ("MVAPICH", (3, 0), YES, {"MVP_ENABLE_GPU": "0"}, (), "MVP_ENABLE_GPU=0"),
    ("ParaStation MPI", (5, 9), {}, {"PSP_CUDA": "1"}, BOTH, "built for it"),
    ("ParaStation MPI", (5, 9), {}, {"PSP_CUDA": "0"}, (), "PSP_CUDA=1 is not set"),
    ("Intel MPI", (2021, 9), {}, {"I_MPI_OFFLOAD": "1"}, (), "2021.12"),
    ("Intel MPI", (2021, 12), {}, {"I_MPI_OFFLOAD": "1"}, BOTH, "CUDA"),
    ("Intel MPI", (2021, 12), {}, {}, (), "I_MPI_OFFLOAD=1 is not set"),
    ("unknown", (), {}, {}, (), "does not say"),
    ("unknown", (), NO, {}, (), "without CUDA"),
    ("unknown", (), YES, {}, BOTH, "nothing is known"),
]


@pytest.mark.parametrize(("vendor", "version", "answers", "environment", "ways", "word"), CASES)
def test_what_is_worth_a_trial(
    vendor: str,
    version: tuple[int, ...],
    answers: dict[str, bool],
    environment: dict[str, str],
    ways: tuple[str, ...],
    word: str,
) -> None:
    library = Library(vendor, version)
    found, why = worth_trying(library, "cuda", answers, environment=environment, mapped=GTL)
    assert found == ways
    assert word in why


def test_never_iallreduce_with_open_mpi() -> None:
    """open-mpi/ompi issues 9845 and 12045: whatever it says, whichever version."""
    for version in ((1, 8), (2, 0), (3, 1), (4, 0, 7), (4, 1, 2), (5, 0, 0), (5, 0, 11), (6,)):
        assert "device" not in known_of(Library("Open MPI", version)).ways


def test_cray_without_its_gtl_library() -> None:
    environment = {"MPICH_GPU_SUPPORT_ENABLED": "1"}
    library = Library("Cray MPICH", (8, 1, 25))
    for prefix, mapped in (("cuda", ["/lib/libmpi_gtl_hsa.so"]), ("hip", GTL), ("cuda", [])):
        ways, why = worth_trying(library, prefix, {}, environment=environment, mapped=mapped)
        assert ways == ()
        assert "libmpi_gtl" in why


def test_rocm() -> None:
    ways, why = worth_trying(Library("ParaStation MPI", (5,)), "hip", {}, environment={})
    assert ways == ()
    assert "not ROCm" in why
    environment = {"MV2_USE_ROCM": "1"}
    assert worth_trying(Library("MVAPICH2", (2, 3, 7)), "hip", {}, environment=environment)[0]


@pytest.mark.mpi
def test_what_a_library_says() -> None:
    def supported(kind: ctypes.c_int, answer: "ctypes._CArgObject") -> int:
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_int))[0] = int(kind.value == 2)
        return 0

    functions: dict[str, Callable[..., int]] = {
        "MPIX_Query_cuda_support": lambda: 1,
        "MPIX_Query_hip_support": lambda: 0,
        "MPIX_GPU_query_support": supported,
    }
    assert ask_library("cuda", functions.get) == {
        "MPIX_Query_cuda_support": True,
        "MPIX_GPU_query_support": False,
    }
    assert ask_library("hip", functions.get) == {
        "MPIX_Query_hip_support": False,
        "MPIX_GPU_query_support": True,
    }
    assert ask_library("cuda", lambda name: None) == {}


@pytest.mark.mpi
def test_this_mpi_was_built_without_cuda() -> None:
    """The wheels of Open MPI and MPICH; another build may say something else."""
    from mpiddp.mpi.library import linked_version
    from mpiddp.transports.gpu_support import identify

    for prefix in ("cuda", "hip"):
        answers = ask_library(prefix)
        assert answers or prefix == "hip"  # Open MPI 4 cannot be asked about ROCm
        if answers and not any(answers.values()):
            assert worth_trying(identify(linked_version()), prefix, answers)[0] == ()

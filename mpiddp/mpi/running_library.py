"""Which MPI library this process has loaded, by its files and by what it calls itself."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

__all__ = ["Library", "identify", "mapped_libraries", "mapped_mpi"]

_VENDORS = (
    # The first match counts: derivatives of MPICH name it, too.
    ("Cray MPICH", r"CRAY MPICH version\s+([\d.]+)"),
    ("ParaStation MPI", r"ParaStation MPI\s+(?:Version:?\s*)?v?([\d.]+)"),
    ("MVAPICH2", r"MVAPICH2(?:-\w+)?\s+Version\s*:\s*([\d.]+)"),
    ("MVAPICH", r"MVAPICH(?:-\w+)?\s+Version\s*:\s*([\d.]+)"),
    ("Intel MPI", r"Intel\(R\) MPI Library\s+([\d.]+)"),
    ("MPICH", r"MPICH Version\s*:\s*([\d.]+)"),
    ("Open MPI", r"Open MPI v([\d.]+)"),
)

# The library itself, of MPICH also by its old name, for the standard ABI, and of Cray; not what
# lies beside it for Fortran and C++.
_LIBMPI = re.compile(r"libmpi(ch|_abi|_(cray|gnu|intel|amd|nvidia|aocc)\w*)?\.so")


@dataclass(frozen=True)
class Library:
    """An MPI library.

    Attributes:
        vendor: its name, "unknown" if it is none of those that are known here.
        version: its numbers, () if unknown.
    """

    vendor: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join([self.vendor, ".".join(map(str, self.version))]).strip()


def identify(text: str) -> Library:
    """Return the MPI library whose MPI_Get_library_version gives `text`. Not collective."""
    for vendor, pattern in _VENDORS:
        if found := re.search(pattern, text, re.IGNORECASE):
            numbers = tuple(int(part) for part in found[1].split(".") if part)
            return Library(vendor, numbers)
    return Library("unknown", ())


def mapped_libraries(start: str) -> list[str]:
    """Return the paths of the loaded libraries whose names begin with `start`. Not collective."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.rstrip("\n").partition("/")[2] for line in maps}
    return sorted(f"/{path}" for path in paths if os.path.basename(path).startswith(f"{start}"))


def mapped_mpi() -> list[str]:
    """Return the paths of the loaded libraries that are an MPI: one, if all is well.

    Not collective.
    """
    return [path for path in mapped_libraries("libmpi") if _LIBMPI.match(os.path.basename(path))]

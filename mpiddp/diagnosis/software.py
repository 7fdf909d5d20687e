"""What runs here: versions, and the MPI library that is loaded."""

from __future__ import annotations

import platform

import torch

from mpiddp.findings import Finding
from mpiddp.mpi.library import compiled_against, interface, linked_version
from mpiddp.mpi.running_library import mapped_mpi
from mpiddp.version import __version__

__all__ = ["report"]


def report() -> list[Finding]:
    """Return versions, and the file of the MPI. Not collective; MPI need not be initialised."""
    headers = " ".join(compiled_against())
    runs = linked_version().strip("\0").splitlines()[0].strip()
    return [
        Finding(
            "ok",
            f"mpiddp {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        ),
        Finding(
            "ok",
            f"MPI: {runs}, called by the interface {interface()} (headers of {headers})",
        ),
        Finding("ok", f"MPI library: {', '.join(mapped_mpi())}"),
    ]

"""Anonymous files in memory, which other processes may map and nobody can execute; their pages."""

from __future__ import annotations

import errno
import os

__all__ = ["create", "knows_own_pages"]

# Of Linux 6.3 and newer; administrators may refuse files without it (vm.memfd_noexec).
_NOEXEC_SEAL = 0x8


def create(name: str) -> int:
    """Return the descriptor of a new file, which programs that are executed do not inherit.

    Not collective.

    Args:
        name: what /proc shows after "/memfd:".

    Raises:
        OSError: the system gives none.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, os.MFD_CLOEXEC)  # before Linux 6.3


def knows_own_pages() -> bool:
    """Return whether Linux tells which pages of 4 KiB are a process's own. Not collective."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as entries:
            return os.sysconf("SC_PAGE_SIZE") == 4096 and len(entries.read(8)) == 8
    except OSError:
        return False

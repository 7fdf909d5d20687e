"""Make anonymous files in memory, which other processes may map, and that nobody can execute."""

from __future__ import annotations

import errno
import os

__all__ = ["create"]

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

"""Which module `python -m` runs, for a package that Python imports before it. A leaf."""

from __future__ import annotations

import sys

__all__ = ["asked_module"]


def asked_module() -> str:
    """Return the module that -m names, while Python imports what is above it; "" without -m.

    Not collective.
    """
    if sys.argv[0] != "-m":
        return ""
    return sys.orig_argv[-len(sys.argv)].removeprefix("-m")

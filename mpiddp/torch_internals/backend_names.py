"""By which names torch finds our backend.

Note [The name ccl]
~~~~~~~~~~~~~~~~~~~
torch-ccl, Intel's backend on MPI, ends with torch 2.8, which is older than what mpiddp works with.
So its name "ccl" is free, and programs that name it get mpiddp. What has registered it before keeps
it, and what registers it later takes it, since torch keeps the last: so torch is asked whose it is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from torch.distributed import Backend

__all__ = [
    "BACKEND",
    "CCL",
    "CCL_MODULES",
    "ccl_is_anothers",
    "installed_ccl",
    "names_mpiddp",
    "names_of",
    "register",
    "true_name",
]

BACKEND = "mpiddp"
CCL = "ccl"

# What is imported for it: its name, and the one that it had until 2022.
CCL_MODULES = ("oneccl_bindings_for_pytorch", "torch_ccl")

_creator: Callable[..., Any] | None = None


def register(creator: Callable[..., Any]) -> list[str]:
    """Let torch make our groups by our names; return them. Not collective.

    Args:
        creator: what makes a group, with torch's extended arguments.
    """
    global _creator
    _creator = creator
    names = [BACKEND] if CCL in Backend.backend_list else [BACKEND, CCL]
    for name in names:
        Backend.register_backend(name, creator, extended_api=True, devices=["cpu", "cuda"])
    return names


def names_of(backend: str) -> list[str]:
    """Return the backends in a string like "cpu:gloo,cuda:nccl". Not collective."""
    return [part.rpartition(":")[2].strip() for part in backend.lower().split(",")]


def names_mpiddp(backend: object) -> bool:
    """Return whether `backend`, as in "cpu:gloo,cuda:mpiddp", names ours. Not collective."""
    if not isinstance(backend, str):
        return False
    return any(name == BACKEND or _is_our_ccl(name) for name in names_of(backend))


def true_name(backend: str) -> str:
    """Return a name as torch has it, with our own for another name of ours. Not collective."""
    parts = [part.rpartition(":") for part in backend.split(",")]
    return ",".join(
        f"{device}{colon}{BACKEND if _is_our_ccl(name.strip().lower()) else name}"
        for device, colon, name in parts
    )


def ccl_is_anothers() -> bool:
    """Return whether torch-ccl has been imported and works. Not collective."""
    return CCL in Backend.backend_list and not _is_our_ccl(CCL)


def installed_ccl() -> str:
    """Return the name under which torch-ccl can be imported, "" if it is not installed.

    Not collective. It is not imported.
    """
    for name in CCL_MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin != BACKEND:  # else it is our stand-in
            return name
    return ""


def _is_our_ccl(name: str) -> bool:
    if name != CCL or _creator is None:
        return False
    plugin = Backend._plugins.get(CCL.upper())
    return plugin is not None and plugin.creator_fn is _creator

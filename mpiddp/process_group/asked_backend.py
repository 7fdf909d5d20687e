"""By what name a script that was written for another backend finds the backend of its groups.

Note [The name that was asked for]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Under `python -m mpiddp` a script that asks for "gloo" gets mpiddp. Programs branch on
`dist.get_backend()`, and one that finds neither "nccl" nor "gloo" may wrap nothing: each rank then
trains alone, without a word. So they are told what they have asked for. torch itself, and this
package, are told what is true: torch makes groups of the backend that the world has, keeps to what
Gloo can do where it finds Gloo, and asks NCCL for its version.
What a program is told it may hand to `new_group`, which makes a group like the world's then. A
"gloo" that the program names itself makes one of Gloo. The two are told apart by identity.
"""

from __future__ import annotations

import weakref
from types import FrameType

import torch
import torch.distributed as dist

from mpiddp.torch_internals.backend_names import true_name

__all__ = ["asked_config", "asked_name", "get_backend", "note", "of_world", "told", "was_told"]

# What the script has named for its world; None: nobody has asked for another backend than ours.
_of_world: str | None = None
_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def note(named: str | None, group: dist.ProcessGroup | None = None) -> None:
    """Let groups be called by the name that the script has asked for. Not collective.

    Args:
        named: the backend, as torch writes it; None: our own.
        group: that this holds for; None: all that are not noted themselves.
    """
    global _of_world
    own = None if named is None else "".join(list(dist.Backend(named)))  # another object
    if group is None:
        _of_world = own
    elif own is not None:
        _of_group[group] = own


def of_world() -> str | None:
    """Return what the script has asked for, for its world. Not collective."""
    return _of_world


def told(group: dist.ProcessGroup | None, caller: FrameType | None) -> str | None:
    """Return what `get_backend` is to answer for one of our groups; None: our own name.

    Not collective.

    Args:
        group: of mpiddp.
        caller: the frame that asks; None: one of C++.
    """
    if _of_world is None and not _of_group:
        return None
    asking = "torch" if caller is None else str(caller.f_globals.get("__name__"))
    if asking.partition(".")[0] in ("torch", "mpiddp"):
        return None
    return _of_world if group is None else _of_group.get(group, _of_world)


def was_told(named: object) -> bool:
    """Return whether a name is what `told` has returned, no other. Not collective."""
    return named is not None and any(named is each for each in (_of_world, *_of_group.values()))


def get_backend(group: dist.ProcessGroup | None = None) -> str:
    """Return the name of the backend that a group really has, "mpiddp" for ours. Not collective.

    Under `python -m mpiddp` torch.distributed's function of this name answers what the script has
    asked for.

    Args:
        group: of torch.distributed; None is the world.

    Raises:
        ValueError: torch.distributed is not initialised, or this rank is not in the group.
    """
    return true_name(str(dist.get_backend(group)))


def asked_config(named: str) -> str:
    """Return what `get_backend_config` says of a backend, such as "cpu:gloo,cuda:gloo".

    Not collective.
    """
    return str(dist.BackendConfig(dist.Backend(named)))


def asked_name(named: str) -> str:
    """Return what a group of a backend calls itself: the part for this machine's devices.

    Not collective.
    """
    by_device = dist.BackendConfig(dist.Backend(named)).get_device_backend_map()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return str(by_device.get(device, next(iter(by_device.values()))))

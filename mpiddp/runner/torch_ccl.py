"""What a script gets as the package oneccl_bindings_for_pytorch, torch-ccl, which is not installed.

All that programs want of it is that its import lets torch know the backend "ccl", which it does
since mpiddp is imported: see Note [The name ccl]. Libraries also ask whether it is there, and which
version of "oneccl_bind_pt", as pip calls it.

DeepSpeed imports it to see whether oneCCL itself is on this machine, and if so compiles against it.
So for DeepSpeed there is none, and it takes Gloo, that is us.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution
from pathlib import Path
from types import FrameType, ModuleType

import torch

from mpiddp.torch_internals.patching import when_imported

__all__ = ["__version__", "is_available"]  # what the stand-in has

# The last one, whose interface this is; programs compare it.
__version__ = "2.8.0+cpu"

_DISTRIBUTION = "oneccl_bind_pt"


def is_available(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether these tensors can be reduced together: each contiguous, and on the CPU.

    Not collective.
    """
    return all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors)


class _StandIn(Distribution):
    """What pip would know of it."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: {__version__}\n"

    def locate_file(self, path: object) -> Path:
        return Path(str(path))


def distributions(name: str | None) -> Iterable[Distribution]:
    """Return the package's description for who asks for its name. Not collective."""
    asked = (name or "").lower().replace("-", "_")  # None: all that are installed
    return [_StandIn()] if asked == _DISTRIBUTION else []


def is_asked_by_deepspeed() -> bool:
    """Return whether the import that runs now is DeepSpeed's own. Not collective."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        if module not in ("importlib", "mpiddp"):
            return module == "deepspeed"
        frame = frame.f_back
    return False


@functools.cache  # once a process
def tell_deepspeed() -> None:
    """Let DeepSpeed see no oneCCL where the script has imported the stand-in. Not collective."""
    when_imported("deepspeed.accelerator.cpu_accelerator", _see_none)


def _see_none(module: ModuleType) -> None:
    if hasattr(module, "oneccl_imported_p"):
        module.__dict__["oneccl_imported_p"] = False

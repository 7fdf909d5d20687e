"""A piece of memory that ranks share, as the program sees it and as it is; and tensors in it."""

from __future__ import annotations

import torch

from mpiddp.reducer.bucket import view_like
from mpiddp.transports.shared_memory import Mapping

__all__ = ["Piece", "at", "bytes_of", "on_its_own"]


class Piece:
    """A piece that parameters or the state of an optimizer lie in, once for some ranks.

    Args:
        shown: a mapping of it, which becomes private: what the program writes there stays its own.

    Attributes:
        shown: what the program sees.
        file: the same memory, as all of the ranks see it.
        start: address of the first byte that the program sees.
        size: in bytes.
    """

    def __init__(self, shown: Mapping) -> None:
        self.shown = shown
        self.file = shown.another()
        self.start = bytes_of(shown).data_ptr()
        self.size = shown.size

    def changes(self) -> int:
        """Return a number that stands for what the program has changed; 0 for nothing."""
        return self.shown.changes(self.file)[0]

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies where the program sees this."""
        return 0 <= tensor.data_ptr() - self.start < self.size


def bytes_of(mapping: Mapping) -> torch.Tensor:
    """Return a mapping's memory as a tensor, which keeps it alive. Not collective."""
    return torch.frombuffer(mapping, dtype=torch.uint8)


def at(memory: torch.Tensor, start: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of memory from a byte on, like a tensor. Not collective."""
    return view_like(memory[start : start + tensor.nbytes].view(tensor.dtype), 0, tensor)


def on_its_own(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the memory of a view whose storage has nothing else. Not collective.

    Otherwise whoever saved one parameter would save all of them.
    """
    if not view.numel():
        return view.detach()
    start = view.storage_offset() * view.itemsize
    memory = view.untyped_storage()[start : start + view.nbytes]
    tensor = torch.empty(0, dtype=view.dtype, device="cpu")
    tensor.set_(memory, 0, view.size(), view.stride())
    return tensor

"""How far saves and loads have come, shown by rank 0: what is counted, and of how much.

Those of another thread are shown while the main thread waits for it.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp import shown_progress
from mpiddp.checkpoint import folders
from mpiddp.checkpoint.trees import leaves

__all__ = ["Counted", "bytes_of", "reading", "retitle", "shown", "verified", "wait_for"]

# Read at a time.
_BLOCK = 1 << 24


def shown(
    path: Path, doing: str, total: Callable[[], int]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which rank 0 shows how far it is with a checkpoint. Not collective.

    Args:
        path: of the checkpoint.
        doing: what is done with it, such as "writing".
        total: returns how many bytes there are.
    """
    return shown_progress.shown(_title(path, doing), total, shows=_is_first())


def verified(path: Path, share: int = 0, shares: int = 1) -> str:
    """Return what `folders.verify` does, and show how far it is. Not collective."""
    with shown(path, "its sha256", lambda: folders.bytes_in(path, share, shares)):
        return folders.verify(path, share, shares)


def retitle(path: Path, doing: str) -> None:
    """Say from now on that something else is done with it. Not collective."""
    shown_progress.retitle(_title(path, doing))


def wait_for(ended: Callable[[float], bool], thread: int | None) -> None:
    """Show how far another thread is with a checkpoint until it has ended. Not collective.

    It returns at once where nothing is to be shown.

    Args:
        ended: waits for so many seconds, and returns whether that thread has done it.
        thread: its number, None where it is not known.
    """
    shown_progress.waiting_for(ended, thread, shows=_is_first())


@contextlib.contextmanager
def reading(file: Path) -> Iterator[Path | Counted]:
    """Yield what `torch.load` is to read, while rank 0 shows how far it is. Not collective.

    Args:
        file: of a checkpoint.
    """
    with shown(file.parent, "reading", lambda: file.stat().st_size):
        if not shown_progress.is_shown():
            yield file
            return
        with Counted(file) as counted:
            yield counted


def bytes_of(state: Any) -> int:
    """Return the bytes of what `torch.save` writes of a state's tensors. Not collective."""
    sizes: dict[int, int] = {}
    for leaf in leaves(state):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            storage = leaf.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


class Counted(io.BufferedReader):
    """A file that counts what is read of it. Not collective.

    Args:
        path: the file.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))

    def read(self, size: int | None = -1, /) -> bytes:
        """Return so many bytes, all that are left by default."""
        data = super().read(size)
        shown_progress.advance(len(data))
        return data

    def readinto(self, buffer: Any, /) -> int:
        """Fill memory, and return how many bytes there were."""
        memory = memoryview(buffer).cast("B")
        done = 0
        while done < len(memory):
            count = super().readinto(memory[done : done + _BLOCK])
            if not count:
                break
            done += count
            shown_progress.advance(count)
        return done


def _title(path: Path, doing: str) -> str:
    return f"checkpoint {path}: {doing}"


def _is_first() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0

"""Snapshots in the memory of each node: what a job that lost a node goes on from.

Every node holds a replica, so one rank of each node keeps a copy of its own, and nothing is sent.
They are checkpoints as of folders.py, in /dev/shm, which outlives the job's processes.
"""

from __future__ import annotations

import atexit
import contextlib
import getpass
import os
import shutil
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mpiddp.checkpoint import folders
from mpiddp.checkpoint.loading import Checkpoint
from mpiddp.checkpoint.ranks import Ranks
from mpiddp.checkpoint.saving import write
from mpiddp.checkpoint.sharded import is_sharded
from mpiddp.checkpoint.trees import Copier

__all__ = ["Snapshots"]

# Those that have written, and are neither closed nor cleared.
_open: weakref.WeakSet[Snapshots] = weakref.WeakSet()


@atexit.register
def _look_at_exit() -> None:
    """Say which are left open, and whether their last snapshots have failed."""
    for snapshots in list(_open):
        if snapshots._process_id != os.getpid():
            continue  # the parent's
        try:
            snapshots.close()
        except Exception as error:
            with contextlib.suppress(Exception):  # a stream that takes nothing
                told = f"mpiddp: the last snapshot at {snapshots.root} has failed: {error}"
                print(told, file=sys.stderr, flush=True)
        warnings.warn(
            f"snapshots at {snapshots.root} have not been closed", ResourceWarning, stacklevel=1
        )


class Snapshots:
    """Keeps snapshots of a training in node memory, as often as they cost next to nothing.

    Not collective.

    Args:
        name: of the training: a job finds the snapshots of an earlier one of the same name on the
            same nodes. Default: the number of the SLURM job, which stays when it is requeued.
        share: of the time that snapshots may take, copying and writing together; the default is
            3.5 %. The next one is made when the last one's time is this share of what has passed.
        folder: where; default: /dev/shm.

    Raises:
        ValueError: there is no name, and no SLURM job; or `share` is not between 0 and 1.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        share: float = 0.035,
        folder: str | os.PathLike[str] = "/dev/shm",
    ) -> None:
        name = os.environ.get("SLURM_JOB_ID") if name is None else name
        if not name:
            raise ValueError("give the training a name: it is not a job of SLURM")
        if not 0 < share <= 1:
            raise ValueError(f"share must be more than 0 and at most 1, not {share}")
        self._root = Path(folder) / f"mpiddp-snapshots-{getpass.getuser()}-{name}"
        self._share = share
        self._thread = ThreadPoolExecutor(1, "mpiddp snapshots")
        self._copier = Copier()
        self._writing: Future[float] | None = None
        self._copying_seconds = 0.0
        self._process_id = os.getpid()
        self._began = self._next = 0.0

    @property
    def root(self) -> Path:
        """The folder on this node."""
        return self._root

    @property
    def _writes(self) -> bool:
        # As torchrun and mpiddp say it. It changes when mpiddp.elastic goes on without a rank.
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def step(self, state: Callable[[], Any], step: int) -> bool:
        """Make a snapshot if it is time. Not collective; every rank calls it after each step.

        Args:
            state: returns what `mpiddp.checkpoint.save` takes, without sharded tensors. It is
                called only if a snapshot is made.
            step: returned by `load`.

        Returns:
            whether a snapshot was begun here: one rank of each node makes them.

        Raises:
            OSError: the last snapshot could not be written, such as for want of memory.
            ValueError: the state has sharded tensors.
        """
        if not self._writes:
            return False
        if self._writing is not None:
            if not self._writing.done():
                return False
            cost = self._copying_seconds + self._writing.result()
            self._writing = None
            self._next = self._began + cost / self._share
        if time.monotonic() < self._next:
            return False
        self._began = time.monotonic()
        given = state()
        if is_sharded(given):
            raise ValueError("a state with sharded tensors has no snapshots in node memory")
        copy = self._copier.copied(given)
        self._copying_seconds = time.monotonic() - self._began
        self._writing = self._thread.submit(self._write, copy, step)
        return True

    def load(
        self, *, weights_only: bool = True, group: dist.ProcessGroup | None = None
    ) -> Checkpoint | None:
        """Return the newest snapshot of all nodes: the same one on all ranks.

        Collective. Damaged ones are passed over.

        Args:
            weights_only: see `torch.load`.
            group: the ranks that load together; default: all.

        Returns:
            what was found, its path on the node that had it; None if there is none.
        """
        ranks = Ranks(group)
        mine = self._newest() if self._writes else None
        known = [
            (entry.step, -rank, entry.path)
            for rank, entry in enumerate(ranks.gather(mine))
            if entry is not None
        ]
        if not known:
            return None
        step, owner, path = max(known)
        file = None if mine is None else mine.path / folders.STATE
        return Checkpoint(ranks.read_on(-owner, file, weights_only), step, path)

    def clear(self) -> None:
        """Remove this node's snapshots: the training is at its end. Not collective."""
        self._thread.shutdown()
        _open.discard(self)
        if self._writes:
            shutil.rmtree(self._root, ignore_errors=True)

    def close(self) -> None:
        """Wait for the last snapshot, and end the thread. What is there stays. Not collective.

        `clear` ends it too. Leaving a ``with`` closes.

        Raises:
            OSError: that snapshot could not be written.
        """
        self._thread.shutdown()
        _open.discard(self)
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _newest(self) -> folders.Entry | None:
        for entry in folders.entries(self._root):
            if not folders.verify(entry.path):
                return entry
        return None

    def _write(self, state: Any, step: int) -> float:
        """Write a snapshot, and return the seconds of a core that it took."""
        _open.add(self)
        began = time.thread_time()
        write(state, self._root, step, keep=1)
        return time.thread_time() - began

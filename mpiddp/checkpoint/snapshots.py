"""Snapshots in the memory of each node: what a job that lost a node goes on from.

Every node holds a replica, so one rank of each node keeps a copy of its own, and nothing is sent.
They are checkpoints as of folders.py, in /dev/shm, which outlives the job's processes.
"""

from __future__ import annotations

import getpass
import os
import shutil
import time
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
        self._began = self._next = 0.0

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
        if not self._writes or self.due_in() > 0:
            return False
        self._began = time.monotonic()
        given = state()
        if is_sharded(given):
            raise ValueError("a state with sharded tensors has no snapshots in node memory")
        copy = self._copier.copied(given)
        self._copying_seconds = time.monotonic() - self._began
        self._writing = self._thread.submit(self._write, copy, step)
        return True

    def due_in(self) -> float:
        """Return in how many seconds `step` makes one; 0 where another rank does. Not collective.

        As long as the last one is being written, it is an estimate.

        Raises:
            OSError: the last snapshot could not be written.
        """
        if not self._writes:
            return 0.0
        now = time.monotonic()
        if self._writing is not None:
            if not self._writing.done():
                since = now - self._began
                return max(self._copying_seconds / self._share - since, since)
            cost = self._copying_seconds + self._writing.result()
            self._writing = None
            self._next = self._began + cost / self._share
        return max(self._next - now, 0.0)

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
        if self._writes:
            shutil.rmtree(self._root, ignore_errors=True)

    def _newest(self) -> folders.Entry | None:
        for entry in folders.entries(self._root):
            if not folders.verify(entry.path):
                return entry
        return None

    def _write(self, state: Any, step: int) -> float:
        """Write a snapshot, and return the seconds of a core that it took."""
        began = time.thread_time()
        write(state, self._root, step, keep=1)
        return time.thread_time() - began

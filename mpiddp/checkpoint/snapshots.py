"""Snapshots in the memory of each node: what a job that lost a node goes on from.

Every node of DDP holds a replica: one rank of each keeps a copy of its own, and nothing is sent. Of
a sharded state each node keeps its shards and those of the node before (shard_snapshots.py). Both
are checkpoints as of folders.py, in /dev/shm, which outlives the job's processes.
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
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mpiddp.checkpoint import claims, folders, progress
from mpiddp.checkpoint.loading import Checkpoint
from mpiddp.checkpoint.ranks import Ranks, raise_together
from mpiddp.checkpoint.saving import write
from mpiddp.checkpoint.sharded import is_sharded
from mpiddp.checkpoint.trees import Copier
from mpiddp.torch_internals.regions import region

if TYPE_CHECKING:
    from mpiddp.checkpoint.shard_rhythm import ShardRhythm

__all__ = ["Snapshots"]

# Those that have written whole states, and are neither closed nor cleared. Closing is collective
# where states are sharded, which nothing at a process's exit may be.
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


def _user() -> str:
    """Return the user's name, or the number of one that has none, as in containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        return str(os.getuid())


class Snapshots:
    """Keeps snapshots of a training in node memory, as often as they cost next to nothing.

    Not collective.

    Args:
        name: of the training: a job finds the snapshots of an earlier one of the same name on the
            same nodes. Default: the number of the SLURM job, which stays when it is requeued, with
            the script and its arguments.
        share: of the time that snapshots may take, copying and writing together; the default is
            3.5 %. The next one is made when the last one's time is this share of what has passed.
        folder: where; default: /dev/shm. They lie in a folder in it that only this user can read;
            where another user has made that first, no snapshots are kept, and a warning says so.

    Raises:
        ValueError: there is no name, and no SLURM job; or `share` is not between 0 and 1.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        share: float = 0.035,
        folder: str | os.PathLike[str] = "/dev/shm",  # noqa: S108  # a folder of the user's own in it
    ) -> None:
        self._named = name is not None
        name = claims.name_in_slurm() if name is None else name
        if not name:
            raise ValueError("give the training a name: it is not a job of SLURM")
        if not 0 < share <= 1:
            raise ValueError(f"share must be more than 0 and at most 1, not {share}")
        # One folder: of one below another, the upper one could be somebody else's.
        inside = f"mpiddp-snapshots-{_user()}-{name}".replace("/", "%2F")
        self._root = Path(folder) / inside
        self._share = share
        self._thread = ThreadPoolExecutor(1, "mpiddp snapshots")
        self._copier = Copier()
        self._writing: Future[float] | None = None
        self._copying_seconds = 0.0
        self._process_id = os.getpid()
        self._began = self._next = 0.0
        self._sharded: bool | None = None  # not known
        self._shards: ShardRhythm | None = None
        # Whether the folder is not this user's.
        self._refused = False
        # Whether no other process may keep snapshots here meanwhile. With mpiddp.elastic another
        # rank may take over.
        self.alone = True

    @property
    def root(self) -> Path:
        """The folder on this node."""
        return self._root

    @property
    def _writes(self) -> bool:
        # As torchrun and mpiddp say it. It changes when mpiddp.elastic goes on without a rank.
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def step(self, state: Callable[[], Any], step: int) -> bool:
        """Make a snapshot if it is time. Every rank calls it after each step.

        Not collective, but for the first call where the state is sharded.

        Args:
            state: returns what `mpiddp.checkpoint.save` takes. It is called where a snapshot is
                made, and once on each rank; not at the same step on all, so it must not
                communicate (FSDP2's `state_dict` does not).
            step: an int, returned by `load`.

        Returns:
            whether a snapshot was begun here: one rank of each node makes them; all ranks where the
            state is sharded.

        Raises:
            OSError: the last snapshot could not be written, such as for want of memory.
            RuntimeError: that is so on another rank, where the state is sharded; or another
                training keeps its snapshots here.
            TypeError: `step` is no int.
        """
        step = folders.as_step(step)
        if self._sharded is None:
            self._make_root()
            self._claim()
            self._sharded = is_sharded(state())
            if self._sharded:
                self._refused = any(Ranks(None).gather(self._refused))
            if self._sharded and not self._refused:
                from mpiddp.checkpoint.shard_rhythm import ShardRhythm

                self._shards = ShardRhythm(self._root, self._share, self._thread)
        if self._shards is not None:
            return self._shards.step(state, step)
        if self._refused or not self._writes or self.due_in() > 0:
            return False
        # Again: another rank may have written so far, and something have removed the folder.
        if not self._make_root():
            return False
        self._began = time.monotonic()
        with region("snapshot: copy"):
            copy = self._copier.copied(state())
        self._copying_seconds = time.monotonic() - self._began
        self._writing = self._thread.submit(self._write, copy, step)
        return True

    def due_in(self) -> float:
        """Return in how many seconds `step` makes one. Not collective.

        0 where another rank does, or all do, since the state is sharded. As long as the last one is
        being written, it is an estimate.

        Raises:
            OSError: the last snapshot could not be written.
        """
        if not self._writes or self._shards is not None:
            return 0.0
        now = time.monotonic()
        if self._writing is not None:
            if not self._writing.done():
                since = now - self._began
                return max(self._copying_seconds / self._share - since, since)
            self._end()
        return max(self._next - now, 0.0)

    def _end(self) -> None:
        """Wait for what is being written. Not collective.

        Raises:
            OSError: it could not be written. That is told once; the next one is tried in time.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        cost = self._copying_seconds
        try:
            cost += writing.result()
        finally:
            self._next = self._began + cost / self._share

    def load(
        self,
        *,
        into: dict[str, Any] | None = None,
        weights_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> Checkpoint | None:
        """Return the newest snapshot that the nodes have: the same one on all ranks.

        Collective. Damaged ones are passed over, and sharded ones of which a shard is on no node.

        Args:
            into: a state of the same form, whose tensors a sharded snapshot fills; the number of
                ranks may be another one. Others ignore it.
            weights_only: see `torch.load`.
            group: the ranks that load together; default: all.

        Returns:
            what was found, its path on the node that had it; None if there is none.

        Raises:
            RuntimeError: on some node they are another training's, which has the same name.
            TypeError: the snapshot is sharded, and `into` was not given.
            pickle.UnpicklingError: it holds objects that ``weights_only=True`` does not allow.
        """
        ranks = Ranks(group)
        error = None
        try:
            self._claim()
        except RuntimeError as stranger:
            error = stranger
        raise_together(ranks, error, "load a snapshot")
        mine = self._newest() if self._writes else None
        sharded = any(entry.sharded for entry in folders.entries_of_user(self._root))
        told = ranks.gather((mine, sharded))
        known = [
            (entry.step, -rank, entry.path)
            for rank, (entry, _) in enumerate(told)
            if entry is not None
        ]
        if any(each for _, each in told):
            after = max(known)[0] if known else None
            loaded = self._load_shards(into, after, ranks, group, weights_only)
            if loaded is not None:
                return loaded
        if not known:
            return None
        step, owner, path = max(known)
        file = None if mine is None else mine.path / folders.STATE
        return Checkpoint(ranks.read_on(-owner, file, weights_only), step, path)

    def _make_root(self) -> bool:
        """Make the folder, this user's alone; return False if it is another's. Not collective."""
        if self._writes:
            try:
                folders.make_private(self._root)
            except PermissionError as error:
                self._refused = True
                warnings.warn(f"no snapshots are kept on this node: {error}", stacklevel=3)
            except OSError:
                pass  # who writes says what is wrong
        return not self._refused

    def _claim(self) -> None:
        """Make sure that what is there is this training's. Not collective."""
        if self.alone and self._writes and not self._refused:
            claims.claim(self._root, self._named)

    def _load_shards(
        self,
        into: dict[str, Any] | None,
        after: int | None,
        ranks: Ranks,
        group: dist.ProcessGroup | None,
        weights_only: bool,
    ) -> Checkpoint | None:
        """Load a sharded snapshot, if there is one of a later step. Collective."""
        from mpiddp.checkpoint.node_copies import Memories
        from mpiddp.checkpoint.shard_snapshots import newest, read_shards

        memories = Memories(self._root.parent, ranks)
        found = newest(self._root, memories, ranks, weights_only)
        if found is None or (after is not None and found.step <= after):
            return None
        error = None
        if into is None:
            error = TypeError(f"{found.path} is sharded: give a state to fill, load(into=state)")
        raise_together(ranks, error, "load a snapshot")
        assert into is not None
        read_shards(into, found, self._root, memories, ranks, group, weights_only)
        return Checkpoint(into, found.step, found.path)

    def wait(self) -> None:
        """Wait until the snapshot that is under way is whole.

        Not collective, but where the state is sharded: there every rank calls it before the process
        group is destroyed.

        Raises:
            OSError: it could not be written.
            RuntimeError: that is so on another rank, where the state is sharded.
        """
        if self._shards is not None:
            self._shards.wait()
        self._end()

    def clear(self) -> None:
        """Remove this node's snapshots: the training is at its end.

        Not collective, but where the state is sharded.
        """
        cleans = self._shards.cleans if self._shards is not None else self._writes
        with contextlib.suppress(OSError, RuntimeError):  # nobody needs the last one
            self.close()
        if cleans and folders.is_users(self._root):
            shutil.rmtree(self._root, ignore_errors=True)

    def close(self) -> None:
        """Wait for the last snapshot, and end the thread. What is there stays.

        Not collective, but where the state is sharded. `clear` ends it too. Leaving a ``with``
        closes.

        Raises:
            OSError: that snapshot could not be written.
            RuntimeError: that is so on another rank, where the state is sharded.
        """
        shards, self._shards = self._shards, None
        try:
            if shards is not None:
                shards.close()
        finally:
            self._thread.shutdown()
            _open.discard(self)
            claims.release(self._root)
        self._end()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None and self._shards is not None:
            # Other ranks may never come to the end of a snapshot: say now what went wrong here.
            self._thread.shutdown(wait=False)
            return
        self.close()

    def _newest(self) -> folders.Entry | None:
        for entry in folders.entries_of_user(self._root):
            if not entry.sharded and not progress.verified(entry.path):
                return entry
        return None

    def _write(self, state: Any, step: int) -> float:
        """Write a snapshot, and return the seconds of a core that it took."""
        _open.add(self)
        began = time.thread_time()
        with region("snapshot: write"):
            write(state, self._root, step, keep=1)
        return time.thread_time() - began

"""When the ranks of a sharded training make snapshots: all at one step, without asking in steps.

The end of a snapshot, in the thread that made it, agrees on the number of the call at which the
next begins. A rank may hear of that too late, and begin at a later call. So a snapshot begins with
a vote: it is given up unless all ranks have the same step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mpiddp.checkpoint.node_copies import Memories
from mpiddp.checkpoint.ranks import Ranks
from mpiddp.checkpoint.shard_snapshots import write_shards
from mpiddp.checkpoint.trees import Copier
from mpiddp.torch_internals.regions import region

__all__ = ["ShardRhythm"]

# Calls between what ranks know of each other's count and the next snapshot, for slow threads.
_NOTICE = 2
# What a snapshot takes from training is more than its own time: caches, and the memory's. Measured
# with benchmarks/snapshots.py: 1.03 times as much.
_BESIDES = 1.1


class ShardRhythm:
    """Makes snapshots of the shards of all ranks. Collective.

    Args:
        root: this node's folder of snapshots.
        share: of the time that they may take.
        thread: that makes them.
    """

    def __init__(self, root: Path, share: float, thread: ThreadPoolExecutor) -> None:
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError(
                "the state has sharded tensors, but there is no process group (any more): make "
                "snapshots before destroy_process_group()"
            )
        # Training calls its own collectives meanwhile, and so do asynchronous saves.
        everyone = dist.get_process_group_ranks(world)
        self._group = dist.new_group(everyone)
        self._ranks = Ranks(self._group)
        self._memories = Memories(root.parent, self._ranks)
        self._root, self._share, self._thread = root, share, thread
        self._copier = Copier()
        self._under_way: Future[int] | None = None
        self._copying_seconds = 0.0
        self._count = 0
        self._next = 2  # the time of a step is known
        self._first_call = self._last_call = 0.0

    @property
    def cleans(self) -> bool:
        """Whether this rank removes its node's snapshots."""
        return self._memories.first

    def step(self, state: Callable[[], Any], step: int) -> bool:
        """Begin a snapshot if it is time; return whether it was. Not collective."""
        self._last_call = time.monotonic()
        self._first_call = self._first_call or self._last_call
        self._count += 1
        if self._under_way is not None:
            if not self._under_way.done():
                return False
            self._end()
        if self._count < self._next:
            return False
        copy = self._copier.copied(state())
        self._copying_seconds = time.monotonic() - self._last_call
        self._begin(copy, step)
        return True

    def wait(self) -> None:
        """Wait until the snapshot that is under way is whole, or given up. Collective."""
        self._end()
        if self._count >= self._next:  # others may have begun at a call at which this rank did not
            self._begin(None, None)
            self._end()

    def close(self) -> None:
        """Wait as `wait` does, and free the group. Collective."""
        try:
            self.wait()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group(self._group)

    def _begin(self, copy: Any, step: int | None) -> None:
        self._under_way = self._thread.submit(self._make, copy, step, self._count)

    def _end(self) -> None:
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            self._next = under_way.result()

    def _make(self, copy: Any, step: int | None, count: int) -> int:
        """Make a snapshot if all have the same step; return the next one's call. Collective."""
        began = time.thread_time()
        steps = set(self._ranks.gather(step))
        if len(steps) == 1 and None not in steps:
            assert step is not None
            with region("snapshot: write"):
                write_shards(copy, self._root, step, self._memories, self._ranks, self._group)
        cost = _BESIDES * (self._copying_seconds + time.thread_time() - began)
        seconds = (self._last_call - self._first_call) / max(self._count - 1, 1)
        told = self._ranks.gather((count, self._count, cost / max(seconds, 1e-9)))
        begun, counts, steps_of_cost = zip(*told, strict=True)
        wait = math.ceil(max(steps_of_cost) / self._share)
        return int(max(max(counts) + _NOTICE, max(begun) + wait))

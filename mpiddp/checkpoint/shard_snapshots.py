"""Snapshots of sharded states: each node's shards in its memory, and a copy on the next node.

torch.distributed.checkpoint writes the shards, into a folder of the same form on each node, and
reads them. What a rank needs and its node has not comes from a node that has it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from mpiddp.checkpoint import folders, progress
from mpiddp.checkpoint.node_copies import Memories, Part, move
from mpiddp.checkpoint.ranks import Ranks, raise_together
from mpiddp.checkpoint.shard_files import METADATA, Planner, Reader, Refused, Writer, read_metadata
from mpiddp.checkpoint.sharded import dcp_failures
from mpiddp.checkpoint.writer_lock import only_writer

__all__ = ["Found", "newest", "read_shards", "write_shards"]

_READING = ".reading-"


def write_shards(
    state: Any, root: Path, step: int, memories: Memories, ranks: Ranks, group: Any
) -> None:
    """Make a snapshot, and remove the one before once all nodes have the new one. Collective.

    Args:
        state: a dict with sharded tensors.
        root: this node's folder of snapshots.
        step: of the state.
        memories: which ranks share a node's memory.
        ranks: of the group.
        group: whose ranks these are; nothing else uses it meanwhile.
    """

    def begin() -> Path | None:
        if not memories.first:
            return None
        lock.enter_context(only_writer(root))
        return folders.begin(root, step)

    with contextlib.ExitStack() as lock:
        begun = ranks.gather(_together(ranks, begin))
        writing: Path | None = begun[memories.members[0]]
        assert writing is not None
        try:
            with dcp_failures(ranks, "make a snapshot"):
                dcp_save(
                    state, storage_writer=Writer(writing, sync_files=False), process_group=group
                )
            _copy_to_next(writing, memories, ranks)
            sums = ranks.gather(_together(ranks, lambda: _sums(writing, memories, ranks)))
            if memories.first:
                own = {name: text for rank in memories.members for name, text in sums[rank].items()}
            _together(ranks, lambda: folders.finish(writing, own) if memories.first else None)
        except BaseException:
            if memories.first:
                shutil.rmtree(writing, ignore_errors=True)
            raise
        # Not before all have the new one: till then the old one is the only whole one.
        _together(ranks, lambda: folders.prune(root, keep=1) if memories.first else None)


def _together(ranks: Ranks, function: Callable[[], Any]) -> Any:
    """Return what a function returns, if it does so on all ranks. Collective."""
    value, error = None, None
    try:
        value = function()
    except Exception as failure:
        error = failure
    raise_together(ranks, error, "make a snapshot")
    return value


def _files_of(writing: Path, rank: int) -> list[Path]:
    """Return the files that dcp has written for a rank. Not collective."""
    return sorted(writing.glob(f"__{rank}_*"))


def _copy_to_next(writing: Path, memories: Memories, ranks: Ranks) -> None:
    """Give every node the list of all shards, and the next one this node's. Collective."""
    metadata = writing / METADATA
    content = ranks.from_first(metadata.read_bytes() if ranks.rank == 0 else None)
    _together(
        ranks,
        lambda: metadata.write_bytes(content) if memories.first and ranks.rank else None,
    )
    mine = []
    if memories.next is not None:
        mine = [
            Part(ranks.rank, memories.next, file.name, 0, file.stat().st_size)
            for file in _files_of(writing, ranks.rank)
        ]
    move([part for each in ranks.gather(mine) for part in each], writing, writing, ranks)
    ranks.gather(None)  # all ranks of the node see what has come to one of them


def _sums(writing: Path, memories: Memories, ranks: Ranks) -> dict[str, str]:
    """Return this rank's part of the sums of what its node holds. Not collective."""
    share = memories.members.index(ranks.rank)
    files = sorted(writing.iterdir())[share :: len(memories.members)]
    return {file.name: folders.sha256(file) for file in files}


class Found(NamedTuple):
    """A snapshot that all nodes together hold.

    Attributes:
        step: its state's.
        path: its folder on the first node that has one.
        own: its folder on this node, None if it has none.
        holders: the ranks that can read each file.
        metadata: what dcp wrote about its shards.
    """

    step: int
    path: Path
    own: Path | None
    holders: dict[str, list[int]]
    metadata: Metadata


class _Held(NamedTuple):
    """What a rank's node has of a snapshot; the key is the same on all nodes."""

    key: tuple[int, str]
    path: Path
    files: frozenset[str]
    needed: frozenset[str]
    problem: str


def newest(root: Path, memories: Memories, ranks: Ranks, weights_only: bool) -> Found | None:
    """Return the newest snapshot of which every shard is on some node. Collective.

    Raises:
        pickle.UnpicklingError: one holds what `weights_only` does not allow.
    """
    share, shares = memories.members.index(ranks.rank), len(memories.members)
    held, error = [], None
    try:
        held = [
            _held(entry.path, entry.step, share, shares, weights_only)
            for entry in folders.entries_of_user(root)
            if entry.sharded
        ]
    except Exception as failure:
        error = failure
    raise_together(ranks, error, "look for snapshots")
    everyones = ranks.gather((memories.members[0], held))
    damaged = {(node, each.key) for node, those in everyones for each in those if each.problem}
    whole: dict[tuple[int, str], list[tuple[int, _Held]]] = {}
    for rank, (node, those) in enumerate(everyones):
        for each in those:
            if (node, each.key) not in damaged:
                whole.setdefault(each.key, []).append((rank, each))
    for key in sorted(whole, reverse=True):
        holders: dict[str, list[int]] = {}
        for rank, each in whole[key]:
            for name in each.files:
                holders.setdefault(name, []).append(rank)
        first, known = whole[key][0]
        if known.needed <= holders.keys():
            own = next((each.path for rank, each in whole[key] if rank == ranks.rank), None)
            metadata = None
            if ranks.rank == first:
                metadata = read_metadata(known.path, weights_only)
            return Found(key[0], known.path, own, holders, ranks.from_rank(first, metadata))
    return None


def _held(path: Path, step: int, share: int, shares: int, weights_only: bool) -> _Held:
    problem = progress.verified(path, share, shares)
    files: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    digest = ""
    try:
        digest = folders.sha256(path / METADATA)
        data = read_metadata(path, weights_only).storage_data
        needed = frozenset(info.relative_path for info in data.values())
        files = frozenset(each.name for each in path.iterdir())
    except Refused:
        problem = problem or folders.verify(path)
        if not problem:  # it was written so
            raise
    except Exception as failure:  # whatever unpickling damaged bytes may raise
        problem = problem or f"{type(failure).__name__}: {failure}"
    return _Held((step, digest), path, files, needed, problem)


def read_shards(
    into: dict[str, Any],
    found: Found,
    root: Path,
    memories: Memories,
    ranks: Ranks,
    group: Any,
    weights_only: bool,
) -> None:
    """Fill a state, also of another number of ranks than wrote it. Collective.

    Args:
        into: a state of the same form.
        found: by `newest`.
        root: this node's folder of snapshots; what comes from other nodes lies there until it is
            read, or beside it if it is another user's.
        memories: which ranks share a node's memory.
        ranks: of the group.
        group: whose ranks these are.
        weights_only: see `torch.load`.
    """
    scratch: list[Path] = []

    def prepare() -> None:
        if memories.first:
            with contextlib.suppress(PermissionError):  # another user's
                folders.make_private(root)
                for left in root.glob(f"{_READING}*"):  # by a job that was killed
                    shutil.rmtree(left, ignore_errors=True)

    def make() -> None:
        place = root if folders.is_users(root) else root.parent
        scratch.append(Path(tempfile.mkdtemp(prefix=_READING, dir=place)))

    try:
        _together(ranks, prepare)
        _together(ranks, make)
        with dcp_failures(ranks, "load a snapshot"):
            dcp_load(
                into,
                storage_reader=_Reader(scratch[0], found, ranks),
                planner=Planner(weights_only),
                process_group=group,
            )
    finally:
        for path in scratch:
            shutil.rmtree(path, ignore_errors=True)


class _Reader(Reader):
    """Reads from a folder that has links to this node's files, and parts of others' files."""

    def __init__(self, scratch: Path, found: Found, ranks: Ranks) -> None:
        super().__init__(scratch, found.metadata)
        self._scratch, self._found, self._ranks = scratch, found, ranks

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        found, ranks = self._found, self._ranks
        infos = [self.storage_data[item.storage_index] for item in plan.items]
        wanted = {(info.relative_path, info.offset, info.length) for info in infos}
        missing = []
        for name, offset, length in wanted:
            holders = found.holders[name]
            if ranks.rank not in holders:
                source = holders[ranks.rank % len(holders)]
                missing.append(Part(source, ranks.rank, name, offset, length))
            elif not (self._scratch / name).exists():
                assert found.own is not None
                (self._scratch / name).symlink_to(found.own / name)
        parts = [part for each in ranks.gather(sorted(missing)) for part in each]
        move(parts, found.own or self._scratch, self._scratch, ranks)
        done: torch.futures.Future[None] = super().read_data(plan, planner)
        return done

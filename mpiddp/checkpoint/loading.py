"""Load the newest checkpoint that is whole."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from mpiddp.checkpoint import folders, progress
from mpiddp.checkpoint.ranks import Ranks, raise_together
from mpiddp.checkpoint.sharded import dcp_failures
from mpiddp.checkpoint.shared_folders import Sighting, look

__all__ = ["Checkpoint", "load"]


class Checkpoint(NamedTuple):
    """What `load` has found.

    Attributes:
        state: what was saved, its tensors in host memory; of a sharded checkpoint what was given
            as `into`.
        step: what `save` was told.
        path: the checkpoint's folder.
    """

    state: Any
    step: int
    path: Path


def load(
    root: str | os.PathLike[str],
    *,
    into: dict[str, Any] | None = None,
    weights_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Checkpoint | None:
    """Load the newest checkpoint in `root` that is whole: the same one on all ranks.

    Collective. One rank of each host looks; the first that sees the newest checkpoint checks and
    reads it, and the others get what it has read, so a slow file system cannot show them different
    ones. A damaged checkpoint is passed over, with a RuntimeWarning on the first rank; so there is
    if not all hosts see what is taken.

    Args:
        root: the folder that `save` was given.
        into: a state of the same form, whose tensors a sharded checkpoint fills, as
            `torch.distributed.checkpoint.load` does. Others ignore it.
        weights_only: see `torch.load`; it holds for all that lies in a sharded checkpoint too.
        group: the ranks that load together; default: all.

    Returns:
        what was found; None if no host sees a checkpoint.

    Raises:
        RuntimeError: there are checkpoints, and all are damaged; hosts see other checkpoints of one
            number; or another rank has an error.
        TypeError: the checkpoint is sharded, and `into` was not given.
        pickle.UnpicklingError: it holds objects that ``weights_only=True`` does not allow.
    """
    ranks = Ranks(group)
    sighting = _newest_whole(Path(root), ranks)
    if sighting is None:
        return None
    entry = sighting.entry
    if not entry.sharded:
        state = ranks.read_on(sighting.ranks[0], entry.path / folders.STATE, weights_only)
        return Checkpoint(state, entry.step, entry.path)
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    from mpiddp.checkpoint.shard_files import Planner, Reader, read_metadata

    reader, error = None, None
    try:
        if into is None:
            raise TypeError(f"{entry.path} is sharded: give a state to fill, load(..., into=state)")
        reader = Reader(entry.path, read_metadata(entry.path, weights_only))
    except Exception as failure:
        error = failure
    raise_together(ranks, error, "load a checkpoint")
    assert into is not None
    with dcp_failures(ranks, "load a checkpoint"):
        dcp_load(into, storage_reader=reader, planner=Planner(weights_only), process_group=group)
    return Checkpoint(into, entry.step, entry.path)


def _newest_whole(root: Path, ranks: Ranks) -> Sighting | None:
    """Return the newest checkpoint that is whole; None if there is none at all. Collective.

    Raises:
        RuntimeError: all are damaged; or hosts have different ones of the same number.
    """
    hosts, sightings = look(ranks, root)
    damaged: list[str] = []
    for number, sighting in enumerate(sightings):
        entry = sighting.entry
        _refuse_two_of_one_number(sighting, sightings[number + 1 :], hosts, ranks)
        # The ranks share the files of a sharded checkpoint. Others are read by one.
        problem = ""
        if entry.sharded:
            problem = progress.verified(entry.path, ranks.rank, ranks.count)
            if problem and not entry.path.is_dir():
                problem = f"{ranks.name(ranks.rank)} on {hosts[ranks.rank]} does not see it"
        elif ranks.rank == sighting.ranks[0]:
            problem = progress.verified(entry.path)
        problems = [each for each in ranks.gather(problem) if each]
        if problems:
            damaged.append(f"{entry.path.name}: {problems[0]}")
            continue
        _warn(sighting, damaged, hosts, ranks)
        return sighting
    if damaged:
        raise RuntimeError(
            f"all checkpoints in {root} are damaged: {'; '.join(damaged)}. To begin anew, give "
            f"another folder, or move them away"
        )
    return None


def _refuse_two_of_one_number(
    sighting: Sighting, others: list[Sighting], hosts: list[str], ranks: Ranks
) -> None:
    """Raise RuntimeError if another host has another checkpoint that is as new. Not collective."""
    for other in others:
        one, two = sighting.entry, other.entry
        # Without sums it is damaged, or not seen whole yet.
        if one.number == two.number and sighting.sums and other.sums:
            raise RuntimeError(
                f"{ranks.name(ranks.rank)} cannot load a checkpoint: {one.path} on "
                f"{hosts[sighting.ranks[0]]} and {two.path} on {hosts[other.ranks[0]]} are two "
                f"checkpoints of the same number, of two trainings in folders that the hosts do "
                f"not share: move away the one that is not meant"
            )


def _warn(sighting: Sighting, damaged: list[str], hosts: list[str], ranks: Ranks) -> None:
    """Warn, on the first rank, if what is taken is not the newest, or not seen by all hosts."""
    if ranks.rank:
        return
    path, source = sighting.entry.path, sighting.ranks[0]
    if damaged:
        warnings.warn(
            f"mpiddp: {ranks.name(0)} takes {path}, because newer checkpoints are damaged: "
            f"{'; '.join(damaged)}",
            RuntimeWarning,
            stacklevel=4,
        )
    blind = sorted(set(hosts) - {hosts[rank] for rank in sighting.ranks})
    if blind:
        warnings.warn(
            f"mpiddp: {path} is read by {ranks.name(source)} on {hosts[source]}, and not seen on "
            f"{', '.join(blind)}. Save into a file system that all hosts share",
            RuntimeWarning,
            stacklevel=4,
        )

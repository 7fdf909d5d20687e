"""Load the newest checkpoint that is whole."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from mpiddp.checkpoint import folders
from mpiddp.checkpoint.ranks import Ranks, raise_together
from mpiddp.checkpoint.sharded import dcp_failures

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

    Collective. The first rank looks, checks and reads, and the others get what it has read, so a
    slow file system cannot show them different ones. A damaged checkpoint is passed over, with a
    RuntimeWarning on the first rank.

    Args:
        root: the folder that `save` was given.
        into: a state of the same form, whose tensors a sharded checkpoint fills, as
            `torch.distributed.checkpoint.load` does. Others ignore it.
        weights_only: see `torch.load`; it holds for all that lies in a sharded checkpoint too.
        group: the ranks that load together; default: all.

    Returns:
        what was found; None if there is no checkpoint.

    Raises:
        RuntimeError: there are checkpoints, and all are damaged; or another rank has an error.
        TypeError: the checkpoint is sharded, and `into` was not given.
        pickle.UnpicklingError: it holds objects that ``weights_only=True`` does not allow.
    """
    ranks = Ranks(group)
    entry = _newest_whole(root, ranks)
    if entry is None:
        return None
    if not entry.sharded:
        state = ranks.read_on(0, entry.path / folders.STATE, weights_only)
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


def _newest_whole(root: str | os.PathLike[str], ranks: Ranks) -> folders.Entry | None:
    """Return the newest checkpoint that is whole; None if there is none at all. Collective.

    Raises:
        RuntimeError: all are damaged.
    """
    known, error = [], None
    if ranks.rank == 0:
        try:
            known = folders.entries(Path(root))
        except Exception as failure:
            error = failure
    raise_together(ranks, error, "look for checkpoints")
    damaged: list[str] = []
    for entry in ranks.from_first(known):
        # The ranks share the files of a sharded checkpoint. Others may be seen by the first alone.
        problem = ""
        if entry.sharded:
            problem = folders.verify(entry.path, ranks.rank, ranks.count)
        elif ranks.rank == 0:
            problem = folders.verify(entry.path)
        problems = [each for each in ranks.gather(problem) if each]
        if problems:
            damaged.append(f"{entry.path.name}: {problems[0]}")
            continue
        if damaged and ranks.rank == 0:
            warnings.warn(
                f"mpiddp: rank 0 takes {entry.path}, because newer checkpoints are damaged: "
                f"{'; '.join(damaged)}",
                RuntimeWarning,
                stacklevel=3,
            )
        found: folders.Entry = entry
        return found
    if damaged:
        raise RuntimeError(
            f"all checkpoints in {root} are damaged: {'; '.join(damaged)}. To begin anew, give "
            f"another folder, or move them away"
        )
    return None

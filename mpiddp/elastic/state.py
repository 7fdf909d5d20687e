"""What training goes on from: the state after the last step that was completed."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpiddp.checkpoint.loading import load
from mpiddp.checkpoint.ranks import Ranks
from mpiddp.checkpoint.saving import save
from mpiddp.checkpoint.sharded import is_sharded
from mpiddp.checkpoint.snapshots import Snapshots
from mpiddp.checkpoint.trees import leaves
from mpiddp.elastic import random_states

__all__ = ["State"]

# Where snapshots and checkpoints have the random states, by rank; no part can be called so.
_RANDOM = "random states"

# The share of the time that looking whether a snapshot is due may take.
_LOOKING = 0.01


class State:
    """The parts of a training's state, as attributes.

    Note [What a commit keeps]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~
    After a step all replicas are alike. A rank is lost while the others wait for it: in backward,
    or in a collective, not while an optimizer writes. So parameters and the optimizer's tensors
    need no copy: a commit notes their versions, which every write in place counts up. What forward
    changes (buffers), values, random states and small parts such as a sampler are copied. A rank
    whose parameters have other versions has written since its last commit; it takes the state of
    one that has not.

    Note [Which random numbers a rank goes on with]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Each rank has streams of its own: of torch on the CPU, of Python's `random`, of numpy's global
    generator if it is imported, and of the rank's GPU if it is in use. After a loss a rank goes
    back to its streams at the last commit, as if nothing had happened. One that the loss has kept
    from a commit that others have made goes on from where it is: others have completed that step
    only with its gradients, so it has drawn what the step needs. A rank that comes gets streams
    that follow from those of the rank whose state it takes, and from its own number.
    Snapshots and checkpoints have the streams of all ranks. A job of as many ranks goes on with
    them; in a job of more, those beyond get streams that follow from the first rank's.

    Args:
        keep_copies: whether a commit copies parameters and optimizer as well: for optimizers that
            communicate in a step (`ZeroRedundancyOptimizer`).
        checkpoints: a folder for `mpiddp.checkpoint`, from which a job that is started again goes
            on; None: none.
        every: how many commits apart checkpoints are.
        name: of the training, for snapshots in node memory; see `mpiddp.checkpoint.Snapshots`.
            None: no snapshots, unless this is a job of SLURM: there they are named for the job,
            the script and its arguments, so a job that is requeued finds them, and another
            program in the same job does not. They are removed when the function under `run` has
            returned, unless `mpiddp.preemption` has announced the end of the job.
        parts: what has ``state_dict`` and ``load_state_dict``, such as a model, an optimizer, a
            sampler; and values that can be copied, such as the step. Each becomes an attribute.
    """

    commits: int
    # When to look whether a snapshot is due, and when that was last: commit, time, seconds.
    _look_at: int
    _looked_at: int
    _looked: float
    _looking: float

    def __init__(
        self,
        *,
        keep_copies: bool = False,
        checkpoints: str | os.PathLike[str] | None = None,
        every: int = 1000,
        name: str | None = None,
        **parts: Any,
    ) -> None:
        self._keep_copies = keep_copies
        self._checkpoints, self._every = checkpoints, every
        self._name = name or _name_in_slurm()
        self._snapshots = Snapshots(self._name) if self._name else None
        self._hold(parts)

    def _hold(self, parts: dict[str, Any]) -> None:
        self._names = list(parts)
        for name, part in parts.items():
            setattr(self, name, part)
        self._interrupted: dict[str, Any] | None = None
        self._note()
        self._count_from(0)

    def commit(self) -> None:
        """Note that a step is complete: from here training goes on. Every rank calls it.

        Collective in those commits that write a checkpoint or look whether a snapshot is due, the
        same ones on all ranks, else not.
        """
        self.commits += 1
        self._note()
        if self._snapshots is not None and self.commits >= self._look_at:
            self._look(self._snapshots)
        if self._checkpoints is not None and self.commits % self._every == 0:
            packed = Ranks(None).gather(random_states.packed(self._random))
            save(self._everything() | {_RANDOM: packed}, self._checkpoints, step=self.commits)

    def restore(self) -> None:
        """Go back to the last commit, as far as a commit keeps it. Not collective."""
        for name, value in self._kept.items():
            part = getattr(self, name)
            if isinstance(part, nn.Module):
                with torch.no_grad():
                    for buffer, kept in zip(part.buffers(), value["buffers"], strict=True):
                        buffer.copy_(kept)
                if self._keep_copies:
                    part.load_state_dict(value["state"])
            elif _is_stateful(part):
                if value is not None:
                    part.load_state_dict(copy.deepcopy(value))
            else:
                setattr(self, name, copy.deepcopy(value))
        random_states.put_back(self._random)
        self._versions = self._versions_now()

    @property
    def is_clean(self) -> bool:
        """Whether nothing was written that `restore` cannot take back. Not collective."""
        return self._keep_copies or self._versions == self._versions_now()

    def sync(self) -> None:
        """Give all ranks the state of the one that has come farthest. Collective.

        Each rank goes on with its own random numbers, see Note [Which random numbers a rank goes on
        with].

        Raises:
            RuntimeError: no rank has a state to go on from.
            ValueError: a part is sharded, so no rank has all of it.
        """
        self._check_whole()
        ranks = Ranks(None)
        standing = ranks.gather((self.is_clean, self.commits))
        able = [(commits, -rank) for rank, (clean, commits) in enumerate(standing) if clean]
        if not able:
            raise RuntimeError(
                "no rank has the state after a complete step: all were lost or had begun to write. "
                "State(keep_copies=True) keeps it"
            )
        commits, source = max(able)
        if ranks.rank == -source:
            self.restore()
        sent = self._everything() | {_RANDOM: random_states.packed(self._random)}
        taken = ranks.state_from(-source, sent)
        packed = taken.pop(_RANDOM)
        self._take(taken)
        if self.commits == commits:
            random_states.put_back(self._random)
        elif self.commits == commits - 1 and self._interrupted is not None:
            random_states.put_back(self._interrupted)
        else:
            random_states.derive(packed, ranks.rank)
        self._interrupted = None
        self._note()
        self._count_from(commits)

    def resume(self) -> bool:
        """Go on from a snapshot or a checkpoint of an earlier job, if there is one. Collective.

        Returns:
            whether there was one that is farther than this state.

        Raises:
            ValueError: a part is sharded, so no rank has all of it.
        """
        self._check_whole()
        found = [self._snapshots.load(weights_only=False)] if self._snapshots is not None else []
        if self._checkpoints is not None:
            found.append(load(self._checkpoints, weights_only=False))
        newest = max((each for each in found if each), key=lambda each: each.step, default=None)
        ranks = Ranks(None)
        if newest is None or newest.step <= max(ranks.gather(self.commits)):
            return False
        packed = newest.state.pop(_RANDOM, [])
        self._take(newest.state)
        if ranks.rank < len(packed):
            random_states.put_back(random_states.unpacked(packed[ranks.rank]))
        elif packed:
            random_states.derive(packed[0], ranks.rank)
        self._note()
        self._count_from(newest.step)
        return True

    def _after_a_restart(self) -> str:
        """Return in words from where a job goes on that is started again. Not collective."""
        places = [
            *(["snapshot"] if self._snapshots is not None else []),
            *(["checkpoint"] if self._checkpoints is not None else []),
        ]
        if places:
            return f"Started again, it goes on from its last {' or '.join(places)}"
        return "Started again, it begins anew, since its State has neither a name nor checkpoints"

    @property
    def _has_snapshots(self) -> bool:
        return self._snapshots is not None

    def _end(self) -> None:
        """Remove the snapshots: the function has returned. Not collective."""
        if self._snapshots is not None and self._name:
            self._snapshots.clear()
            self._snapshots = Snapshots(self._name)  # another function may go on with this state

    def _interrupt(self) -> None:
        """Note what was drawn when a rank was lost. Not collective.

        Another loss before `sync` has ended changes nothing: meanwhile the last commit's are here.
        """
        if self._interrupted is None:
            self._interrupted = random_states.current()

    def _look(self, snapshots: Snapshots) -> None:
        """Make a snapshot on all nodes if it is time, and agree when to look again. Collective."""
        began = time.monotonic()
        pace = (began - self._looked) / max(self.commits - self._looked_at, 1)
        packed = random_states.packed(self._random)
        told = Ranks(None).gather((packed, snapshots.due_in(), pace, self._looking))
        of_ranks, due, paces, looking = zip(*told, strict=True)
        seconds = max(*due, max(looking) / _LOOKING)
        if max(due) == 0:
            random = {_RANDOM: list(of_ranks)}
            snapshots.step(lambda: self._everything() | random, self.commits)
        # Not much farther than last time: the first steps say little of how long one takes.
        most = 2 * (self.commits - self._looked_at)
        apart = min(max(math.ceil(seconds / max(*paces, 1e-6)), 1), max(most, 1))
        self._looked, self._looked_at = began, self.commits
        self._look_at = self.commits + apart
        self._looking = time.monotonic() - began

    def _count_from(self, commits: int) -> None:
        self.commits = self._looked_at = commits
        self._look_at, self._looked, self._looking = commits + 1, time.monotonic(), 0.0

    def _leave(self) -> None:
        """Free what belongs to the world that ends. Not collective; maybe called several times."""

    def _arrive(self) -> None:
        """Make what belongs to the new world, before `sync`. Collective."""

    def _check_whole(self) -> None:
        if is_sharded(self._everything()):
            raise ValueError(
                "a State has parts that are alike on all ranks, and one of these is sharded "
                "(DTensor, ShardedTensor). For sharded parts there are "
                "mpiddp.checkpoint.Snapshots and mpiddp.checkpoint.save"
            )

    def _everything(self) -> dict[str, Any]:
        """Return all parts, in the form that is saved and sent."""
        parts = {name: getattr(self, name) for name in self._names}
        return {
            name: part.state_dict() if _is_stateful(part) else part for name, part in parts.items()
        }

    def _take(self, everything: dict[str, Any]) -> None:
        for name, value in everything.items():
            part = getattr(self, name)
            if _is_stateful(part):
                part.load_state_dict(value)
            else:
                setattr(self, name, copy.deepcopy(value))

    def _note(self) -> None:
        self._kept = {name: self._keep(getattr(self, name)) for name in self._names}
        self._random = random_states.current()
        self._versions = self._versions_now()

    def _keep(self, part: Any) -> Any:
        if isinstance(part, nn.Module):
            kept: dict[str, Any] = {"buffers": [buffer.clone() for buffer in part.buffers()]}
            if self._keep_copies:
                kept["state"] = copy.deepcopy(part.state_dict())
            return kept
        if isinstance(part, torch.optim.Optimizer):
            return copy.deepcopy(part.state_dict()) if self._keep_copies else None
        return copy.deepcopy(part.state_dict() if _is_stateful(part) else part)

    def _versions_now(self) -> list[tuple[int, int]]:
        return [(id(tensor), tensor._version) for tensor in self._large()]

    def _large(self) -> Iterator[Tensor]:
        for name in self._names:
            part = getattr(self, name)
            if isinstance(part, nn.Module):
                yield from part.parameters()
            elif isinstance(part, torch.optim.Optimizer):
                for state in part.state.values():
                    yield from (leaf for leaf in leaves(state) if isinstance(leaf, Tensor))


def _is_stateful(part: object) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _name_in_slurm() -> str | None:
    """Return a name that this program has again when its job is requeued, None elsewhere."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    # No number of a step: mpirun's ranks have that of their launcher, or none.
    script = os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else ""
    told = hashlib.sha256("\0".join([script, *sys.argv[1:]]).encode()).hexdigest()
    return f"{job}-{Path(script).stem}-{told[:12]}"

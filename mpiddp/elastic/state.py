"""What training goes on from: the state after the last step that was completed."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mpiddp.checkpoint.loading import load
from mpiddp.checkpoint.ranks import Ranks
from mpiddp.checkpoint.saving import save
from mpiddp.checkpoint.snapshots import Snapshots
from mpiddp.checkpoint.trees import Copier, leaves

__all__ = ["State"]


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

    Args:
        keep_copies: whether a commit copies parameters and optimizer as well: for optimizers that
            communicate in a step (`ZeroRedundancyOptimizer`).
        checkpoints: a folder for `mpiddp.checkpoint`, from which a job that is started again goes
            on; None: none.
        every: how many commits apart checkpoints are.
        name: of the training, for snapshots in node memory; see `mpiddp.checkpoint.Snapshots`.
            None: no snapshots, unless this is a job of SLURM.
        parts: what has ``state_dict`` and ``load_state_dict``, such as a model, an optimizer, a
            sampler; and values that can be copied, such as the step. Each becomes an attribute.
    """

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
        name = name or os.environ.get("SLURM_JOB_ID")
        self._snapshots = Snapshots(name) if name else None
        self._copier = Copier()
        self._hold(parts)

    def _hold(self, parts: dict[str, Any]) -> None:
        self._names = list(parts)
        for name, part in parts.items():
            setattr(self, name, part)
        self.commits = 0
        self._note()

    def commit(self) -> None:
        """Note that a step is complete: from here training goes on. Every rank calls it.

        Collective in those commits that write a checkpoint, else not.
        """
        self.commits += 1
        self._note()
        if self._snapshots is not None:
            self._snapshots.step(self._everything, self.commits)
        if self._checkpoints is not None and self.commits % self._every == 0:
            save(self._everything(), self._checkpoints, step=self.commits)

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
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        self._versions = self._versions_now()

    @property
    def is_clean(self) -> bool:
        """Whether nothing was written that `restore` cannot take back. Not collective."""
        return self._keep_copies or self._versions == self._versions_now()

    def sync(self) -> None:
        """Give all ranks the state of the one that has come farthest. Collective.

        Raises:
            RuntimeError: no rank has a state to go on from.
        """
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
        self._take(ranks.state_from(-source, self._everything()))
        self.commits = commits
        self._note()

    def resume(self) -> bool:
        """Go on from a snapshot or a checkpoint of an earlier job, if there is one. Collective.

        Returns:
            whether there was one.
        """
        found = [self._snapshots.load(weights_only=False)] if self._snapshots is not None else []
        if self._checkpoints is not None:
            found.append(load(self._checkpoints, weights_only=False))
        newest = max((each for each in found if each), key=lambda each: each.step, default=None)
        if newest is None:
            return False
        self._take(newest.state)
        self.commits = newest.step
        self._note()
        return True

    def _leave(self) -> None:
        """Free what belongs to the world that ends. Not collective; maybe called several times."""

    def _arrive(self) -> None:
        """Make what belongs to the new world, before `sync`. Collective."""

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
        self._random = (torch.get_rng_state(), random.getstate())
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

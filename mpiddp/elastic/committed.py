"""What training goes on from: the parts of its state, at the last commit that a rank has."""

from __future__ import annotations

import math
import os
import pickle
import re
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.serialization import get_unsafe_globals_in_checkpoint

from mpiddp.checkpoint import folders
from mpiddp.checkpoint.claims import name_in_slurm
from mpiddp.checkpoint.loading import Checkpoint, load
from mpiddp.checkpoint.ranks import Ranks
from mpiddp.checkpoint.saving import save
from mpiddp.checkpoint.sharded import is_sharded
from mpiddp.checkpoint.snapshots import Snapshots
from mpiddp.checkpoint.trees import leaves, map_leaves
from mpiddp.elastic import random_states
from mpiddp.elastic.parts import (
    Keeper,
    loaded,
    other_buffers,
    set_buffers,
    state_of,
)
from mpiddp.elastic.shared_copies import SharedCopies

__all__ = ["Committed"]

# What snapshots, checkpoints and messages have beside the parts; no part can be called so. The
# random states are by rank.
_RANDOM, _BUFFERS = "random states", "buffers beside state_dict"

# The share of the time that looking whether a snapshot is due may take.
_LOOKING = 0.01


class _Own:
    """Stands for what every rank has itself."""


class Committed:
    """The parts of a training's state, as attributes.

    Note [What a commit keeps]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~
    All that the state names goes back together. What a loss interrupts may have written parameters
    or a learning rate since the commit: a loss is seen wherever a rank waits, and that may be
    between optimizer.step() and the commit, or some steps after it. So a commit copies all parts.

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
    """

    # What lets `resume` read other objects than weights have.
    _to_read_them = (
        "only if you say that nobody else can write into the folder: elastic.State(..., "
        "weights_only=False). Or name the types: torch.serialization.add_safe_globals"
    )

    # How many commits there are, with the one that is under way.
    _coming: int
    # When to look whether a snapshot is due, and when that was last: commit, time, seconds.
    _look_at: int
    _looked_at: int
    _looked: float
    _looking: float

    def _begin(
        self,
        checkpoints: str | os.PathLike[str] | None,
        every: int,
        name: str | None,
        parts: dict[str, Any],
        weights_only: bool = True,
    ) -> None:
        """Take the arguments of `State`; see there. Not collective."""
        self._check_names(parts)
        self._weights_only = weights_only
        self._looked_at_file = False
        self._checkpoints, self._every = checkpoints, every
        self._name = name or name_in_slurm()
        self._snapshots = Snapshots(self._name) if self._name else None
        if self._snapshots is not None:
            self._snapshots.alone = False
        self._copies = SharedCopies()
        self._keepers = {name: Keeper(self._copies) for name in parts}
        for part_name, part in parts.items():
            setattr(self, part_name, part)
        self._interrupted: dict[str, Any] | None = None
        self._commits = 0
        self._note()
        self._count_from(0)

    def _check_names(self, names: Iterable[str]) -> None:
        """Parts and the methods are attributes of one object: no name may be both's."""
        ours = [vars(kind) for kind in type(self).__mro__ if kind.__module__.startswith("mpiddp.")]
        for name in names:
            if any(name in attributes for attributes in ours):
                why = "it has an attribute of this name itself"
            elif name.startswith("_") or not name.isidentifier():
                why = "the names of parts are identifiers that do not begin with an underscore"
            else:
                continue
            raise ValueError(
                f"{type(self).__name__} cannot have a part called {name!r}: {why}. Choose another "
                f"name"
            )

    def commit(self) -> None:
        """Note that a step is complete: from here training goes on. Every rank calls it.

        Collective in those commits that write a checkpoint or look whether a snapshot is due, the
        same ones on all ranks. Where ranks share parameters it is always collective over these,
        and they keep one copy together. Else it is not.
        """
        self._note(self._commits + 1)
        if self._snapshots is not None and self._commits >= self._look_at:
            self._look(self._snapshots)
        if self._checkpoints is not None and self._commits % self._every == 0:
            packed = Ranks(None).gather(random_states.packed(self._random))
            state = self._everything() | {_RANDOM: packed}
            self._look_at_file(save(state, self._checkpoints, step=self._commits))

    def restore(self) -> None:
        """Go back to the last commit: all parts, and this rank's random numbers. Not collective.

        Raises:
            RuntimeError: an exception ended that commit before it had kept all parts.
        """
        if not self._whole:
            raise RuntimeError("an exception ended the last commit before it had kept all parts")
        self._copies.begin_handing_out()
        for name, keeper in self._keepers.items():
            setattr(self, name, keeper.put_back())
        random_states.put_back(self._random)

    def sync(self) -> None:
        """Give all ranks the last commit of the one that has come farthest. Collective.

        Each rank goes on with its own random numbers, see Note [Which random numbers a rank goes on
        with].

        Raises:
            RuntimeError: no rank has a commit to go on from.
            ValueError: a part is sharded, so no rank has all of it.
        """
        self._check_whole()
        ranks = Ranks(None)
        standing = ranks.gather((self._whole, self._commits))
        able = [(commits, -rank) for rank, (whole, commits) in enumerate(standing) if whole]
        if not able:
            raise RuntimeError(
                f"rank {ranks.rank}: an exception ended the last commit of each rank that is left "
                f"before it had kept all parts"
            )
        commits, source = max(able)
        if self._whole:
            self.restore()
        sent = self._everything()
        own: list[Any] = []
        if all(state == (True, commits) for state in standing):
            # What all ranks have, in memory that some share, takes no memory of each.
            own = list(filter(self._copies.was_handed_out, leaves(sent)))
        if min(ranks.gather(len(own))) == len(own) > 0:
            sent = map_leaves(sent, lambda e: _Own() if self._copies.was_handed_out(e) else e)
        buffers = {name: other_buffers(getattr(self, name), sent[name]) for name in sent}
        sent |= {_RANDOM: random_states.packed(self._random), _BUFFERS: buffers}
        taken = ranks.state_from(-source, sent)
        packed, buffers = taken.pop(_RANDOM), taken.pop(_BUFFERS)
        rest = iter(own)
        taken = map_leaves(taken, lambda leaf: next(rest) if isinstance(leaf, _Own) else leaf)
        self._take(taken)
        for name, values in buffers.items():
            set_buffers(getattr(self, name), values)
        if self._commits == commits:
            random_states.put_back(self._random)
        elif self._commits == commits - 1 and self._interrupted is not None:
            random_states.put_back(self._interrupted)
        else:
            random_states.derive(packed, ranks.rank)
        self._interrupted = None
        self._note()
        self._count_from(commits)

    def _resume(self) -> bool:
        """Do what `State.resume` says. Collective."""
        self._check_whole()
        found = []
        if self._snapshots is not None:
            found.append(self._load(self._snapshots, "snapshot", self._snapshots.root))
        if self._checkpoints is not None:
            found.append(self._load(self._checkpoints, "checkpoint", self._checkpoints))
        newest = max((each for each in found if each), key=lambda each: each.step, default=None)
        ranks = Ranks(None)
        if newest is None or newest.step <= max(ranks.gather(self._commits)):
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

    def _load(
        self,
        source: Snapshots | str | os.PathLike[str],
        kind: str,
        root: str | os.PathLike[str],
    ) -> Checkpoint | None:
        """Load the newest checkpoint or snapshot. Collective.

        Raises:
            RuntimeError: it has objects that are read only where the user has said so.
        """
        try:
            if isinstance(source, Snapshots):
                return source.load(weights_only=self._weights_only)
            return load(source, weights_only=self._weights_only)
        except (pickle.UnpicklingError, RuntimeError) as error:
            told = str(error)
            if not self._weights_only or "weights_only" not in told:
                raise
            names = re.search(r"GLOBAL (\S+)", told)
            raise RuntimeError(
                f"rank {Ranks(None).rank}: the newest {kind} in {root} has objects of "
                f"{names[1] if names else 'other types'}. To read such ones runs code, so it is "
                f"{self._to_read_them}"
            ) from error

    def _look_at_file(self, path: Path) -> None:
        """Say at the first one that is looked at if `resume` will not read it. Not collective."""
        if self._looked_at_file or not self._weights_only or Ranks(None).rank:
            return
        try:
            names = get_unsafe_globals_in_checkpoint(path / folders.STATE)
        except FileNotFoundError:
            return  # a newer snapshot has taken its place
        self._looked_at_file = True
        if names:
            warnings.warn(
                f"mpiddp: rank 0: the state has objects of {', '.join(names)}. To read such ones "
                f"from a file runs code, so resume() does it {self._to_read_them}",
                RuntimeWarning,
                stacklevel=3,
            )

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
        pace = (began - self._looked) / max(self._commits - self._looked_at, 1)
        packed = random_states.packed(self._random)
        told = Ranks(None).gather((packed, snapshots.due_in(), pace, self._looking))
        of_ranks, due, paces, looking = zip(*told, strict=True)
        seconds = max(*due, max(looking) / _LOOKING)
        for entry in folders.entries_of_user(snapshots.root)[:1]:
            self._look_at_file(entry.path)
        if max(due) == 0:
            random = {_RANDOM: list(of_ranks)}
            snapshots.step(lambda: self._everything() | random, self._commits)
        # Not much farther than last time: the first steps say little of how long one takes.
        most = 2 * (self._commits - self._looked_at)
        apart = min(max(math.ceil(seconds / max(*paces, 1e-6)), 1), max(most, 1))
        self._looked, self._looked_at = began, self._commits
        self._look_at = self._commits + apart
        self._looking = time.monotonic() - began

    def _count_from(self, commits: int) -> None:
        self._commits = self._looked_at = commits
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
        return {name: state_of(getattr(self, name)) for name in self._keepers}

    def _take(self, everything: dict[str, Any]) -> None:
        for name, state in everything.items():
            part = loaded(getattr(self, name), state, self._copies.was_handed_out)
            setattr(self, name, part)

    def _note(self, commits: int | None = None) -> None:
        """Keep all parts. Collective where ranks share some of them."""
        self._coming = self._commits if commits is None else commits
        self._copies.begin(self._everything)
        self._keep()
        self._copies.finish()
        self._whole = True

    def _keep(self) -> None:
        self._whole, self._commits = False, self._coming
        for name, keeper in self._keepers.items():
            keeper.keep(getattr(self, name))
        self._random = random_states.current()

    def _leave_node(self) -> None:
        """Go on without the ranks that share parameters with this one. Not collective.

        For when none of them does anything. A commit that was under way counts if any rank has
        begun to write it.
        """
        if self._copies.take_interrupted():
            self._keep()
            self._whole = True
        self._copies.let_go()

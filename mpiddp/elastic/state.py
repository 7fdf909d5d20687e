"""The state that a user gives to a function under `elastic.run`."""

from __future__ import annotations

import os
import warnings
from typing import Any

from mpiddp.elastic.committed import Committed

__all__ = ["State"]


class State(Committed):
    """The parts of a training's state, as attributes.

    Collective where its methods say so. After a loss all parts go back together to the last commit
    that a rank has. A commit takes the memory of model and optimizer once more, and the time of
    copying them. See Note [What a commit keeps] and Note [Which random numbers a rank goes on
    with].

    Args:
        checkpoints: a folder for `mpiddp.checkpoint`, from which a job that is started again goes
            on; None: none.
        every: how many commits apart checkpoints are.
        name: of the training, for snapshots in node memory; see `mpiddp.checkpoint.Snapshots`.
            None: no snapshots, unless this is a job of SLURM: there they are named for the job,
            the script and its arguments, so a job that is requeued finds them, and another
            program in the same job does not. They are removed when the function under `run` has
            returned, unless `mpiddp.preemption` has announced the end of the job.
        weights_only: whether `resume` reads from checkpoints and snapshots what `torch.load` reads
            with ``weights_only=True``: tensors and plain values. With False also any other object,
            which runs code of whoever could write into the folder.
        keep_copies: has no effect any more: every commit keeps copies.
        parts: what has ``state_dict`` and ``load_state_dict``, such as a model, an optimizer, a
            sampler; and values that can be copied, such as the step. Each becomes an attribute.

    Raises:
        ValueError: a part has the name of a method, or one that begins with an underscore.
    """

    def __init__(
        self,
        *,
        checkpoints: str | os.PathLike[str] | None = None,
        every: int = 1000,
        name: str | None = None,
        weights_only: bool = True,
        keep_copies: bool | None = None,
        **parts: Any,
    ) -> None:
        if keep_copies is not None:
            warnings.warn(
                "keep_copies of elastic.State has no effect: every commit keeps copies",
                DeprecationWarning,
                stacklevel=2,
            )
        self._begin(checkpoints, every, name, parts, weights_only)

    @property
    def is_clean(self) -> bool:
        """Whether the last commit has kept all parts, so that `restore` works. Not collective."""
        return self._whole

    def resume(self) -> bool:
        """Go on from a snapshot or a checkpoint of an earlier job, if there is one. Collective.

        Returns:
            whether there was one that is farther than this state.

        Raises:
            RuntimeError: the newest of them has objects that `weights_only` does not allow.
            ValueError: a part is sharded, so no rank has all of it.
        """
        return self._resume()

"""The optimizer's part of join(): what a rank without inputs does when the others step.

Note [Steps without inputs]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Within ``model.join()`` a rank whose inputs have ended still owns a part of the parameters, and has
the means of its part. After each backward it listens: the others tell what they do with the
gradients before they do it (a norm, a factor of a clip or of a GradScaler), until they step or say
that they skip the step. The model's own hook of Join starts it, so the optimizer's does nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from mpiddp.ddp.step_followers import ENDS_OF_STEPS

if TYPE_CHECKING:
    from mpiddp.ddp.shared_parameters import SharedParameters
    from mpiddp.ddp.wrapper import DistributedDataParallel
    from mpiddp.optim.members import Member

__all__ = ["UnevenSteps"]

# What the last argument of what is told is called in an error.
_USED = {"norm": "norm_type", "scale": "max_norm", "unscale": "the inverse of a GradScaler's scale"}


class UnevenSteps(Joinable):
    """An optimizer that ranks without inputs follow. Collective."""

    _shared: SharedParameters
    _wrapper: weakref.ref[DistributedDataParallel]
    _members: list[Member]
    _used: dict[str, str]

    def _let_follow(self) -> None:
        """Be followed from now on. Collective."""
        self._number = self._shared.followers.add(self._follow)
        # Whether this rank has no inputs, and is in the middle of what the others do.
        self._follows = False

    if TYPE_CHECKING:  # the optimizer's own

        def _bind(self) -> None: ...

        def _show_gradients(self) -> None: ...

        def _step_together(self, settings: Iterable[dict[str, Any]]) -> None: ...

        def _take_groups(self) -> None: ...

        def _norm(self, norm_type: float) -> torch.Tensor: ...

        def _scale(self, factor: float) -> None: ...

        def _own_gradients(self) -> list[torch.Tensor]: ...

        def _agree_on_overflow(self, found: Iterable[torch.Tensor]) -> None: ...

    def skip_step(self) -> None:
        """Let ranks without inputs know that there is no step after this backward.

        Collective within ``model.join()``, elsewhere it does nothing.
        """
        self._tell("skip")

    def _tell(self, what: str, *arguments: Any) -> None:
        """Let ranks without inputs follow, see `_follow`. Collective within ``model.join()``."""
        self._note_use(what, arguments)
        wrapper = self._wrapper()
        if wrapper is not None and wrapper._join_config.enable and not self._follows:
            self._shared.followers.tell(self._number, what, arguments)

    def _tell_of_changes(self) -> None:
        """Let ranks without inputs have the clips that were put off. Collective within join().

        Raises:
            RuntimeError: gradients were changed otherwise, which they cannot follow.
        """
        shared = self._shared
        if not shared.is_uneven() or self._follows:
            return
        unscaled = _USED["unscale"] in self._used
        written = any(bucket.own_elements() for bucket in shared.reducer.buckets)
        if any(member.is_replaced for member in self._members) or (written and not unscaled):
            raise RuntimeError(
                f"rank {shared.group.me}: gradients were changed within join(), where ranks "
                f"without inputs step their part of the means: clip by norm, or change the loss"
            )
        if shared.scaling.factors:
            self._tell("noted", shared.scaling.factors)

    def _note_use(self, what: str, arguments: tuple[Any, ...]) -> None:
        """Note what is done to gradients, see Note [Where settings are compared]."""
        if what == "skip":
            self._used.clear()
        elif what in _USED:
            self._used[_USED[what]] = repr(arguments[-1])

    @torch.no_grad()
    def _follow(self, what: str, arguments: tuple[Any, ...]) -> bool:
        """Do on a rank without inputs what the others do, with their means of its own part.

        Collective with that.

        Returns:
            whether their step has ended.
        """
        if not self._follows:
            reducer = self._shared.reducer
            self._take_groups()
            self._bind()
            for member in self._members:
                used = reducer.was_used_anywhere(member.index)
                member.has_gradient = used and member.is_present
            self._show_gradients()
        self._follows = what not in ENDS_OF_STEPS
        self._note_use(what, arguments)
        if what == "step":
            self._step_together(*arguments)
        elif what == "norm":
            self._norm(*arguments)
        elif what == "scale":
            self._scale(arguments[0])
        elif what == "noted":
            self._shared.scaling.note_of_others(*arguments)
        elif what == "unscale":
            found, own = torch.zeros(1, dtype=torch.float32, device="cpu"), self._own_gradients()
            if own:
                factor = torch.tensor(arguments[0], dtype=torch.float32, device="cpu")
                torch._amp_foreach_non_finite_check_and_unscale_(own, found, factor)
            self._agree_on_overflow([found])
        if not self._follows:
            self._bind()
        return not self._follows

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return a hook that does nothing. Not collective."""
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        """The device of Join's own messages."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """The model's process group."""
        return self._shared.group

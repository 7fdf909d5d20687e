"""Who does on a rank without inputs what optimizers do on the others, within join()."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpiddp.process_group.group import ProcessGroup

__all__ = ["ENDS_OF_STEPS", "StepFollowers"]

# Takes what to do and its arguments; returns whether the step has ended with it.
Follower = Callable[[str, tuple[Any, ...]], bool]

# What ends a step, of all that is told.
ENDS_OF_STEPS = ("step", "skip")


class StepFollowers:
    """The optimizers of one module's shared parameters. Not collective.

    Args:
        group: of the module.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._followers: list[weakref.WeakMethod[Follower]] = []
        # Those that have to hear of a step, or that there is none, before the next backward.
        self._untold: set[int] = set()

    def add(self, follow: Follower) -> int:
        """Add a method, and return its number, which is the same on all ranks. Not collective."""
        self._followers.append(weakref.WeakMethod(follow))
        return len(self._followers) - 1

    def __bool__(self) -> bool:
        return bool(self._followers)

    def _living(self) -> set[int]:
        return {number for number, each in enumerate(self._followers) if each() is not None}

    def follow(self) -> None:
        """Do on a rank without inputs what the others do. Collective with their steps."""
        left = self._living()
        nothing: Any = None
        while left:
            told = self._group.allgather_objects(nothing)
            number, what, arguments = next(each for each in told if each is not None)
            follow = self._followers[number]()
            if follow is not None and follow(what, arguments):
                left.discard(number)

    def tell(self, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        """Let ranks without inputs do what this rank will do. Collective.

        Args:
            number: of the follower.
            what: to do.
            arguments: for it.
        """
        if what in ENDS_OF_STEPS:
            self._untold.discard(number)
        self._group.allgather_objects((number, what, arguments))

    def begin_join(self) -> None:
        """Forget what an exception has left of another join(). Not collective."""
        self._untold = set()

    def expect_a_step(self) -> None:
        """Note that ranks without inputs will listen after a backward. Not collective."""
        self._untold = self._living()

    def skip_untold(self) -> None:
        """Say that what has not stepped since the backward does not. Collective within join()."""
        for number in sorted(self._untold):
            self.tell(number, "skip", ())

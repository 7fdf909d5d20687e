"""See what torch does while a trace is on: backward, steps of optimizers, batches of DataLoaders.

All of it is taken back when the trace ends.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from mpiddp.torch_internals import regions

__all__ = ["TorchHooks"]

Note = Callable[[str, float, float], None]


class TorchHooks:
    """The hooks and replaced functions of one trace. Not collective.

    Args:
        note: told the name of what has ended, when it began and when it ended, in its own thread.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self._began = threading.local()
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._replace(torch.autograd, "backward", "backward")
        self._replace(dataloader._BaseDataLoaderIter, "__next__", "DataLoader.__next__")
        regions.tell(note)

    def remove(self) -> None:
        """Take all back. Not collective."""
        regions.tell(None)
        for handle in self._handles:
            handle.remove()
        for owner, name, inner, ours in self._replaced:
            # Else somebody has replaced it since, and calls ours, which calls the inner one.
            if getattr(owner, name) is ours:
                setattr(owner, name, inner)

    def _replace(self, owner: Any, name: str, shown: str) -> None:
        inner, note = getattr(owner, name), self._note

        @functools.wraps(inner)
        def timed(*arguments: Any, **settings: Any) -> Any:
            began = time.monotonic()
            try:
                return inner(*arguments, **settings)
            finally:
                note(shown, began, time.monotonic())

        setattr(owner, name, timed)
        self._replaced.append((owner, name, inner, timed))

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._steps().append(time.monotonic())

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        # Of a step that was under way when the trace began, nothing is known.
        if self._steps():
            began = self._steps().pop()
            self._note(f"optimizer: {type(optimizer).__name__}.step", began, time.monotonic())

    def _steps(self) -> list[float]:
        """Return when the steps began that are under way in this thread: one may call another."""
        if not hasattr(self._began, "steps"):
            self._began.steps = []
        steps: list[float] = self._began.steps
        return steps

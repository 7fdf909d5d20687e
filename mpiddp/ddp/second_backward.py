"""Refuse a second backward of one forward where the first one has left out parameters.

Note [Two backward passes]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A backward is averaged when it ends, with zeros for the parameters that got no gradient. If one is
missing where none may be, all ranks raise at the next forward. Two losses of one forward, each
with a backward of its own, are such a case; but the step after them may be the last one, and the
second pass adds to each rank's own gradients only. torch's class, which waits for the missing ones,
raises in the second pass because parameters are used again. So from such a reduction to the next
forward the parameters have one more hook, which raises.
"""

from __future__ import annotations

import weakref

import torch

from mpiddp.reducer.errors import raise_second_backward
from mpiddp.reducer.reducer import ParameterHook, Reducer

__all__ = ["SecondBackward"]


class SecondBackward:
    """Raises in the next backward pass that adds to a gradient of a reducer's parameters.

    Not collective.

    Args:
        reducer: some parameters have had no gradient in its last backward.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = weakref.ref(reducer)
        self._missing = list(reducer.missing)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._raise)  # type: ignore[no-untyped-call]
            for parameter in reducer.parameters
            if parameter.requires_grad
        ]

    def remove(self) -> None:
        """Let backward passes be."""
        for handle in self._handles:
            handle.remove()

    def _raise(self, parameter: torch.Tensor) -> None:
        reducer = self._reducer()
        hooks = parameter._post_accumulate_grad_hooks or {}
        # Another wrapper of the same parameters may be in use by now.
        if reducer is None or sum(isinstance(hook, ParameterHook) for hook in hooks.values()) > 1:
            return
        try:
            raise_second_backward(
                self._missing, reducer.process_group.me, reducer.describe_parameter
            )
        except RuntimeError as error:
            reducer.note_error(error)
            raise

"""torch's `mixed_precision` argument: what its hooks expect of a reducer.

Note [Gradients in mixed precision]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch's wrapper swaps each parameter's data for a copy in `param_dtype` before forward, and its
communication hook swaps it back, so that gradients come in `param_dtype` and are widened when
they are reduced. They never are views of a bucket then. The hook is called with
a bucket in the dtype that it reduces in, which keeps the precision of the means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.python_hook import Hook, PythonHook

if TYPE_CHECKING:
    from mpiddp.bucket import Bucket
    from mpiddp.wrapper_reducer import WrapperReducer


def gradient_dtypes(
    config: Any, parameters: Sequence[torch.Tensor]
) -> tuple[torch.dtype, torch.dtype] | None:
    """Return in which dtypes gradients come, and the hook reduces them. Not collective.

    Args:
        config: torch's `_MixedPrecision`, or None. Without a `param_dtype` its parameters keep
            theirs, so that there is nothing to say.
        parameters: of the reducer. They are numbered as torch's hooks want it.
    """
    if config is None:
        return None
    for index, parameter in enumerate(parameters):
        parameter._idx = index  # type: ignore[attr-defined]
    if config.param_dtype is None:
        return None
    return config.param_dtype, config.reduce_dtype or config.param_dtype


def hook_caller(hook: Hook, state: object) -> PythonHook:
    """Return what calls a communication hook, whether it is that of mixed precision or not."""
    return (UpcastHook if hasattr(state, "upcast_stream") else PythonHook)(hook, state)


class UpcastHook(PythonHook):
    """torch's hook for mixed precision, which works on a stream of its own."""

    def finish(self, reducer: WrapperReducer, bucket: Bucket) -> torch.Tensor:
        """Wait for the hook's stream, then as in `PythonHook`. Not collective.

        torch's hook lets the caller's stream wait in a callback of autograd's, which comes after
        the reducer's.
        """
        assert hasattr(self.state, "upcast_stream")
        torch.accelerator.current_stream().wait_stream(self.state.upcast_stream)
        return super().finish(reducer, bucket)

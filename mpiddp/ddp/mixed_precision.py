"""torch's `mixed_precision` argument: what its hooks expect of a reducer.

Note [Gradients in mixed precision]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch's wrapper swaps each parameter's data for a copy in `param_dtype` before forward, and its
communication hook swaps it back, so that gradients come in `param_dtype` and are widened when
they are reduced. They are then never views of a bucket. The hook is called with
a bucket in the dtype that it reduces in, which keeps the precision of the means.

Note [Mixed precision on the CPU]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch's hooks need streams, which a CPU does not have. Nothing runs beside the computation there,
so a parameter gets its own data back, and its gradient is widened, as soon as the gradient has
arrived: in a hook that runs before the reducer's, which finds an ordinary parameter. Gradients are
reduced in `reduce_dtype` as with the hooks of `mpiddp.compression`. The narrow data must stay until
then: autograd keeps the parameter, not its data. Parameters without a gradient get their data back
at the end of backward; after a forward without gradients, all of them do.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives  # torch's class uses it, and imports it nowhere
from torch.autograd import Variable

from mpiddp.ddp.python_hook import Hook, PythonHook

if TYPE_CHECKING:
    from mpiddp.reducer.bucket import Bucket
    from mpiddp.reducer.state import ReducerState


def gradient_dtypes(
    config: Any, parameters: Sequence[torch.Tensor]
) -> tuple[torch.dtype, torch.dtype] | None:
    """Return the dtypes in which gradients come and the hook reduces them. Not collective.

    Args:
        config: torch's `_MixedPrecision`, or None. Without a `param_dtype` parameters keep their
            own dtypes, and the result is None.
        parameters: of the reducer. They are numbered as torch's hooks expect.
    """
    if config is None:
        return None
    for index, parameter in enumerate(parameters):
        parameter._idx = index  # type: ignore[attr-defined]
    if config.param_dtype is None:
        return None
    return config.param_dtype, config.reduce_dtype or config.param_dtype


def hook_caller(hook: Hook, state: object) -> PythonHook:
    """Return what calls a communication hook, be it mixed precision's or another."""
    return (UpcastHook if hasattr(state, "upcast_stream") else PythonHook)(hook, state)


class UpcastHook(PythonHook):
    """torch's hook for mixed precision, which works on a stream of its own."""

    def finish(self, reducer: ReducerState, bucket: Bucket) -> torch.Tensor:
        """Wait for the hook's stream, then as in `PythonHook`. Not collective.

        torch's hook makes the caller's stream wait in an autograd callback, which runs after the
        reducer's.
        """
        assert hasattr(self.state, "upcast_stream")
        torch.accelerator.current_stream().wait_stream(self.state.upcast_stream)
        return super().finish(reducer, bucket)


def compression_of(config: Any) -> torch.dtype | None:
    """Return the 16-bit dtype in which gradients travel, None for their own. Not collective."""
    dtype: torch.dtype | None = config.reduce_dtype or config.param_dtype
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


class NarrowParameters:
    """Parameters on the CPU that forward and backward see in another dtype.

    Not collective. See Note [Mixed precision on the CPU].

    Args:
        parameters: those to cast.
        dtype: the other dtype; None for their own.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._ending = False
        # The node of a backward in which forward runs; None: outside of any.
        self._forward_in: torch.autograd.graph.Node | None = None
        # Weak: their hooks hold this object.
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        for parameter in parameters:
            if dtype is not None and parameter.requires_grad:
                hook = self._widen_with_gradient
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def narrow(self) -> None:
        """Give all parameters their data in the other dtype."""
        self._ending = False
        self._forward_in = torch._C._current_autograd_node()
        for parameter in self._alive():
            if not parameter.is_floating_point() or parameter.dtype is self._dtype:
                continue
            # The name is torch's.
            parameter._fp_param = parameter.data  # type: ignore[attr-defined]
            parameter.data = parameter.data.to(self._dtype)

    def widen(self) -> None:
        """Give all parameters their own data back."""
        self._forward_in = None
        for parameter in self._alive():
            _widen(parameter)

    def _alive(self) -> list[torch.Tensor]:
        parameters = [] if self._dtype is None else [known() for known in self._parameters]
        return [parameter for parameter in parameters if parameter is not None]

    def _widen_with_gradient(self, parameter: torch.Tensor) -> None:
        if not self._ending:
            self._ending = True
            Variable._execution_engine.queue_callback(self._end_of_backward)
        _widen(parameter)
        if parameter.grad is not None and parameter.grad.dtype is not parameter.dtype:
            parameter.grad = parameter.grad.to(parameter.dtype)

    def _end_of_backward(self) -> None:
        self._ending = False
        # At the end of a backward within this module's own one, that still needs them.
        if torch._C._current_autograd_node() is self._forward_in:
            self.widen()


def _widen(parameter: torch.Tensor) -> None:
    own = getattr(parameter, "_fp_param", parameter)
    if parameter.dtype is not own.dtype:
        parameter.data = own

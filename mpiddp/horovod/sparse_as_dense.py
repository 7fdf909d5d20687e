"""Let sparse gradients travel as dense ones, in the buckets."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mpiddp.torch_internals.compiler import skip_compilation


@skip_compilation
class SparseAsDense:
    """Makes sparse gradients dense before the reducer takes them, and sparse again. Not collective.

    Make it before the reducer, whose hooks come last.

    Args:
        parameters: whose gradients may be sparse, with whether it is known that they are, the same
            on all ranks. Others are watched until one brings a dense gradient.
    """

    def __init__(self, parameters: Mapping[torch.Tensor, bool]) -> None:
        # Of those that were sparse, the number of sparse dimensions.
        self._sparse: dict[torch.Tensor, int] = {p: 1 for p, known in parameters.items() if known}
        self._dense: list[torch.Tensor] = []
        self._handles = {}
        for parameter in parameters:
            self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._hook)  # type: ignore[no-untyped-call]
            if parameter.grad is not None:
                self._hook(parameter)

    def _hook(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            self._sparse[parameter] = gradient.sparse_dim()
            parameter.grad = gradient.to_dense()
        elif parameter not in self._sparse:
            self._dense.append(parameter)

    def restore(self) -> None:
        """Make those gradients sparse again, once they are averaged."""
        for parameter, dimensions in self._sparse.items():
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                parameter.grad = parameter.grad.to_sparse(dimensions)
        for parameter in self._dense:
            if parameter in self._handles:
                self._handles.pop(parameter).remove()
        self._dense.clear()

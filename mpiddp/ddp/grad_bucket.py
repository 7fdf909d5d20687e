"""GradBucket: the gradients of one bucket, as a communication hook sees them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import GradBucket as _TorchBucket


class GradBucket:
    """The argument of a communication hook, with the methods of torch's `dist.GradBucket`.

    Not collective. torch's own has no Python constructor. One difference: `gradients` is right for
    parameters that are not contiguous too; torch's has their elements in the wrong places.

    Args:
        index: position of the bucket in launch order.
        buffer: all gradients end to end, 1-D; or the one sparse gradient.
        parameters: their parameters, in the order of the buffer.
        is_last: whether it is the last bucket of a backward pass.
    """

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        is_last: bool,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = list(parameters)
        self._is_last = is_last

    @property  # type: ignore[misc]  # read only
    def __class__(self) -> type:
        """Torch's class, so that isinstance works in a hook; it cannot be subclassed."""
        return _TorchBucket

    def index(self) -> int:
        """Return the position of this bucket in launch order, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return the 1-D tensor of all gradients, the same object until `set_buffer`."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradient of each parameter, a view of `buffer` in the parameter's shape.

        Empty where the gradient is sparse, as in torch.
        """
        if self._buffer.layout is not torch.strided:
            return []
        sizes = [parameter.numel() for parameter in self._parameters]
        # A buffer that a hook has set may be longer.
        parts = torch.split(self._buffer.narrow(0, 0, sum(sizes)), sizes)
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of `gradients`."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return whether this is the last bucket of a backward pass."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the tensor that `buffer` and `gradients` return.

        Raises:
            TypeError: it is not a tensor.
        """
        if not isinstance(buffer, torch.Tensor):
            raise TypeError(f"set_buffer() needs a torch.Tensor, not {type(buffer).__name__}")
        self._buffer = buffer

"""The part of the reducer that errors and reports describe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from mpiddp.reducer.bucket import Bucket


class DescribedReducer(Protocol):
    """A reducer as errors describe it."""

    @property
    def expecting(self) -> bool:
        """Whether a forward asked for gradients to be reduced."""

    @property
    def gradient_as_bucket_view(self) -> bool:
        """Whether each gradient is a view into its bucket."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The parameters, by index."""

    @property
    def describe_parameter(self) -> Callable[[int], str]:
        """Returns the name of a parameter."""

    @property
    def process_group(self) -> Any:
        """The ranks that average gradients."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets, in launch order."""

    @property
    def next_bucket(self) -> int:
        """The first bucket that was not launched in this backward."""

    @property
    def waiting_for(self) -> int:
        """The bucket that this rank waits for, or -1."""

    @property
    def ready(self) -> int:
        """How many gradients of this backward are there."""

    @property
    def reductions(self) -> int:
        """How many backward passes were reduced."""

    @property
    def shadowing(self) -> bool:
        """Whether this rank takes part in others' backward, having no inputs left."""

    @property
    def passes(self) -> Any:
        """The forward passes, see forward_passes.py, or None."""

    @property
    def number(self) -> int:
        """The number of its module among those that its group has wrapped, from 1."""

    def without_gradient(self) -> list[int]:
        """Return the parameters that have no gradient so far in this backward."""

    def describe_bucket(self, bucket: Bucket) -> str:
        """Return what to call a bucket in errors."""

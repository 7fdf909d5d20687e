"""With MPIDDP_DEBUG: whether all ranks have the same bits of parameters, every so many steps."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from mpiddp import settings
from mpiddp.collectives import packing
from mpiddp.reducer import model_check

if TYPE_CHECKING:
    from mpiddp.reducer.state import ReducerState

__all__ = ["SameBits", "check_of", "word_for"]


class SameBits:
    """Compares the parameters of a module between all ranks.

    Args:
        every: backward passes that are reduced, between two comparisons.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        # Whether other ranks may be without inputs, whose parameters are not stepped.
        self.is_uneven = False

    def __call__(self, reducer: ReducerState) -> None:
        """Compare, if it is time to. Collective, when a backward has been reduced.

        Raises:
            RuntimeError: they differ; raised on all ranks.
        """
        uneven, self.is_uneven = self.is_uneven, False
        if uneven or reducer.reductions % self._every:
            return
        group = reducer.process_group
        description = {
            reducer.describe_parameter(index): word_for(parameter)
            for index, parameter in enumerate(reducer.parameters)
        }
        found = model_check.differences(group, description)
        if found:
            raise RuntimeError(
                f"rank {group.me}: after {reducer.reductions} reduced backward passes the "
                f"ranks do not have the same parameters, of which these are digests: "
                f"{'; '.join(found)}. "
                f"Something has changed them on some ranks only, or an optimizer steps with "
                f"settings that differ"
            )


def check_of() -> SameBits | None:
    """Return what compares parameters if MPIDDP_DEBUG asks for it, else None. Not collective."""
    every = settings.DEBUG.read()
    return SameBits(every) if every else None


def word_for(value: Any) -> str:
    """Return a word for a tensor's bits, or another value. Not collective."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    flat = packing.bytes_of(value.detach().contiguous())
    return hashlib.blake2b(flat.cpu().numpy().data, digest_size=8).hexdigest()

"""What programs do with mean gradients before a step: read, measure, clip and unscale them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.ddp.mean_scaling import scale_means
from mpiddp.optim.members import Member, dtype_of_norm, norm_of
from mpiddp.torch_internals.compiler_loading import disable_compilation

if TYPE_CHECKING:
    from mpiddp.ddp.shared_parameters import SharedParameters
    from mpiddp.optim.blocks import Block

__all__ = ["GradientUses"]


class GradientUses:
    """An optimizer each of whose ranks measures and scales what it steps. Collective."""

    _shared: SharedParameters
    _members: list[Member]
    param_groups: list[dict[str, Any]]

    if TYPE_CHECKING:  # the optimizer's own

        def _all_blocks(self) -> Iterator[Block]: ...

        def _take_gradients(self) -> None: ...

        def _put_back(self) -> None: ...

        def _tell(self, what: str, *arguments: Any) -> None: ...

    @disable_compilation
    def gradients(self) -> list[torch.Tensor | None]:
        """Return ``.grad`` of each parameter, in the order of the groups. Not collective."""
        return [each.grad for group in self.param_groups for each in group["params"]]

    @disable_compilation
    @torch.no_grad()
    def gradient_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of all mean gradients as one vector, with the same bits everywhere.

        Collective.

        Args:
            norm_type: greater than zero, or infinity for the largest absolute value.

        Raises:
            ValueError: it is neither.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type must be greater than zero, not {norm_type!r}")
        self._shared.scaling.multiply_all()
        self._take_gradients()
        self._tell("norm", norm_type)
        return self._norm(norm_type)

    def _norm(self, norm_type: float) -> torch.Tensor:
        self._put_back()
        own = norm_of(self._own_gradients(), norm_type)
        # Python's max would overlook some NaNs.
        numbers = torch.tensor(self._shared.exchange(own), dtype=torch.float64, device="cpu")
        total = torch.linalg.vector_norm(numbers, norm_type)
        if self._shared.across_nodes:
            self._shared.broadcast(total)
        norm: torch.Tensor = total.to(dtype_of_norm(self._members))
        return norm

    @disable_compilation
    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; return what it was.

        Collective. As `torch.nn.utils.clip_grad_norm_` of all parameters of this optimizer.

        Args:
            max_norm: the largest norm.
            norm_type: as for `gradient_norm`.
            error_if_nonfinite: whether to raise if the norm is infinite or NaN.

        Raises:
            RuntimeError: it is, on all ranks.
        """
        norm = self.gradient_norm(norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is {norm.item()}, so it cannot "
                f"be clipped"
            )
        factor = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
        self._tell("scale", factor.item(), float(max_norm))
        self._scale(factor.item())
        return norm

    def _scale(self, factor: float) -> None:
        """Multiply the gradients by a number. Collective, after the ranks have met."""
        factors = {member.index: factor for member in self._members if member.has_gradient}
        scale_means(self._shared, factors, factors)
        self._shared.exchange(0)  # who reads gradients after this finds all of them scaled

    def _own_gradients(self) -> list[torch.Tensor]:
        return [
            block.gradient
            for block in self._all_blocks()
            if block.has_gradient and block.gradient is not None
        ]

    @torch.no_grad()
    def begin_unscaling(self) -> None:
        """Let a GradScaler change gradients in place, which ends with `agree_on_overflow`.

        Collective.
        """
        self._take_gradients()
        self._put_back()

    def agree_on_overflow(self, found: Iterable[torch.Tensor], scale: float) -> None:
        """Let each of these numbers be the largest of the node's ranks. Collective.

        Args:
            found: of a GradScaler, whether some gradient is not finite.
            scale: with which it has multiplied the gradients.
        """
        self._tell("unscale", scale)
        self._agree_on_overflow(found)

    def _agree_on_overflow(self, found: Iterable[torch.Tensor]) -> None:
        found = list(found)
        worst = max(self._shared.exchange(max((number.item() for number in found), default=0.0)))
        for number in found:
            number.fill_(worst)

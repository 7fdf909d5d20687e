"""The step of a DistributedOptimizer with op=Adasum: each rank steps, then the steps are added.

As in Horovod, what is added adaptively are not gradients but what the optimizer makes of them: the
differences of the parameters. So nothing can begin before the step; the reducer has no part in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from mpiddp.horovod.adasum import adasum, is_power_of_two
from mpiddp.horovod.process_sets import ProcessSet, registered
from mpiddp.process_group.group import ProcessGroup
from mpiddp.torch_internals.compiler import skip_compilation


@skip_compilation
class AdasumMethods(torch.optim.Optimizer):
    """What a DistributedOptimizer with op=Adasum does in place of the one it was made of."""

    _group: ProcessGroup | None
    _process_set: ProcessSet
    _compression: Any
    _parameter_names: dict[torch.Tensor, str]
    backward_passes_per_step: int

    def renew(self) -> None:
        """Add over the ranks that the process set has now. Not collective.

        Raises:
            ValueError: their number is no power of two.
        """
        group = registered(self._process_set).group
        if group is not None and not is_power_of_two(group.size()):
            raise ValueError(
                f"op=Adasum needs a power of two of ranks, and the process set has {group.size()}"
            )
        self._group = None if group is None or group.size() == 1 else group

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with this rank's gradients; then add all ranks' steps. Collective.

        Every rank must have the same parameters before.
        """
        if self._group is None:
            return super().step(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            before = [parameter.clone() for parameter in parameters]
        result = super().step(closure)
        with torch.no_grad():
            for parameter, start in zip(parameters, before, strict=True):
                # A parameter may be frozen on all ranks, or have no gradient on some.
                if parameter.requires_grad:
                    change, context = self._compression.compress(parameter - start)
                    adasum(self._group, change)
                    change = self._compression.decompress(change, context)
                    parameter.copy_(start + change)
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the inner step calls the step hooks

    def synchronize(self) -> None:
        """Do nothing, as in Horovod: the step itself is what is added. Not collective."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError, as in Horovod. Not collective."""
        raise AssertionError("skip_synchronize() is not possible with op=Adasum")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Note the number; gradients add up over passes by themselves. Not collective."""
        self.backward_passes_per_step = passes

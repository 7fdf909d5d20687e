"""The wrapper's part of join(), for a rank whose inputs end before the others'.

See joined.pyx. The rest of join() is torch's.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist

from mpiddp.ddp.parameter_sharing import ParameterSharing
from mpiddp.reducer import joined
from mpiddp.torch_internals.compiler import skip_compilation


@skip_compilation
class UnevenInputs(ParameterSharing):
    """torch's wrapper, whose ranks may have different numbers of inputs. Collective."""

    _divide_by_initial_world_size: bool

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        """Tell ranks that have joined whether to reduce. Overrides torch's method of this name.

        Collective.
        """
        ranks = torch.tensor([float(not is_joined_rank and self.require_backward_grad_sync)])
        dist.all_reduce(ranks, group=self.process_group)
        self._ranks_to_reduce = int(ranks.item())
        if self.reducer.same_bits is not None:
            # Also after join(), as torch's class goes on asking.
            self.reducer.same_bits.is_uneven = self._ranks_to_reduce < self.process_group.size()
        return self._ranks_to_reduce > 0 if is_joined_rank else None

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Reduce zeros in the backward of others. Collective. Overrides torch's method."""
        divisor = self.process_group.size()
        # Only the first of several joinables is told the number of ranks, as in torch.
        if self._join_config.is_first_joinable and not self._divide_by_initial_world_size:
            divisor = self._ranks_to_reduce
        joined.begin(self.reducer, divisor)
        if self._shared_parameters is not None and self._shared_parameters.followers:
            joined.finish(self.reducer)
            self._shared_parameters.step_for_others()

    def _match_unused_params_allreduce(self) -> None:
        """Do nothing: the reduction itself says who used what. Overrides torch's method."""

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Copy the last joiner's model to all. Collective. Overrides torch's method."""
        joined.finish(self.reducer)
        shared = self._shared_parameters
        with nullcontext() if shared is None else shared.writing():
            super()._sync_final_model(is_last_joiner)

"""The wrapper's part of join(), for a rank whose inputs end before the others'.

See joined.pyx. The rest of join() is torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from mpiddp.ddp.parameter_sharing import ParameterSharing
from mpiddp.ddp.shared_parameters import SharedParameters, all_of_process
from mpiddp.reducer import joined
from mpiddp.torch_internals.compiler import skip_compilation

# Called where a join() of a model that shares its parameters begins, on all ranks.
at_join: list[Callable[[SharedParameters], None]] = []


@functools.cache
def _watch_ends_of_inputs() -> None:
    """Let a rank tell what has not stepped, before it has no inputs. Once a process."""
    leave = Join.__exit__

    @functools.wraps(leave)
    def tell_and_leave(
        self: Join,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            for shared in all_of_process():
                shared.followers.skip_untold()
        leave(self, kind, value, traceback)

    Join.__exit__ = tell_and_leave  # type: ignore[method-assign]


@skip_compilation
class UnevenInputs(ParameterSharing):
    """torch's wrapper, whose ranks may have different numbers of inputs. Collective."""

    _divide_by_initial_world_size: bool

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        """Tell ranks that have joined whether to reduce. Overrides torch's method of this name.

        Collective.
        """
        self.reducer.joins = True
        shared = self._shared_parameters
        ranks = torch.tensor(
            [float(not is_joined_rank and self.require_backward_grad_sync)], device="cpu"
        )
        dist.all_reduce(ranks, group=self.process_group)
        self._ranks_to_reduce = int(ranks.item())
        if self.reducer.same_bits is not None:
            # Also after join(), as torch's class goes on asking.
            self.reducer.same_bits.is_uneven = self._ranks_to_reduce < self.process_group.size()
        if shared is not None and self._ranks_to_reduce > 0 and not is_joined_rank:
            shared.followers.expect_a_step()
        return self._ranks_to_reduce > 0 if is_joined_rank else None

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Forward's first part. Extends torch's method of this name."""
        if self._shared_parameters is not None and torch.is_grad_enabled():
            self._shared_parameters.followers.skip_untold()
        return super()._pre_forward(*inputs, **kwargs)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Prepare for ranks without inputs. Collective. Extends torch's method."""
        if self._shared_parameters is not None:
            _watch_ends_of_inputs()
            self._shared_parameters.followers.begin_join()
            for prepare in at_join:
                prepare(self._shared_parameters)
        hook: JoinHook = super().join_hook(**kwargs)
        return hook

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Reduce zeros in the backward of others. Collective. Overrides torch's method."""
        divisor = self.process_group.size()
        # Only the first of several joinables is told the number of ranks, as in torch.
        if self._join_config.is_first_joinable and not self._divide_by_initial_world_size:
            divisor = self._ranks_to_reduce
        joined.begin(self.reducer, divisor)
        if self._shared_parameters is not None and self._shared_parameters.followers:
            joined.finish(self.reducer)
            self._shared_parameters.followers.follow()

    def _match_unused_params_allreduce(self) -> None:
        """Do nothing: the reduction itself says who used what. Overrides torch's method."""

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Copy the last joiner's model to all. Collective. Overrides torch's method."""
        joined.finish(self.reducer)
        shared = self._shared_parameters
        with nullcontext() if shared is None else shared.writing():
            super()._sync_final_model(is_last_joiner)

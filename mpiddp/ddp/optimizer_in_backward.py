"""Step the optimizers of `_apply_optimizer_in_backward` as soon as a bucket is averaged."""

# Annotations must be objects, not strings: registration compares those of a hook with its types.

import weakref
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable


def set_up(wrapper: torch.nn.parallel.DistributedDataParallel) -> None:
    """Register the hook that steps them, if parameters have optimizers of their own.

    Collective if they have.

    Raises:
        RuntimeError: another communication hook is registered.
    """
    optimized = [p for p in wrapper._module_parameters if hasattr(p, "_in_backward_optimizers")]
    if not optimized:
        return
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    # torch's hooks would step before the gradient is averaged.
    for parameter in optimized:
        if parameter in param_to_optim_hook_handle_map:
            for handle in param_to_optim_hook_handle_map[parameter]:
                handle.remove()
    wrapper.register_comm_hook(weakref.ref(wrapper), step_on_mean)


def step_on_mean(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket and step the optimizers of its parameters: a communication hook.

    Collective. Torch's own hook for this needs an accelerator.

    Args:
        state: a weak reference to the wrapper.
        bucket: the bucket.

    Returns:
        A completed future of the averaged gradients.
    """
    wrapper = state()
    future: torch.futures.Future[torch.Tensor] = wrapper.reducer._run_allreduce_hook(bucket)
    future.wait().div_(wrapper.process_group.size())
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        optimizers = getattr(parameter, "_in_backward_optimizers", ())
        if optimizers:
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    if bucket.is_last():
        # After the reducer's own callback, which was queued before.
        Variable._execution_engine.queue_callback(lambda: _drop_gradients(state))
    return future


def _drop_gradients(state: weakref.ref[Any]) -> None:
    """Drop the gradients that have been used, as happens without a wrapper."""
    wrapper = state()
    for parameter in () if wrapper is None else wrapper._module_parameters:
        if hasattr(parameter, "_in_backward_optimizers"):
            parameter.grad = None

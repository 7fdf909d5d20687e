"""The wrapper's communication hooks: registering one, and keeping it when the wrapper is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mpiddp.ddp import hooks as comm_hooks
from mpiddp.ddp import optimizer_in_backward
from mpiddp.ddp.bucket_tuning import size_limits
from mpiddp.ddp.logger import Logger, logs_errors
from mpiddp.ddp.mixed_precision import hook_caller
from mpiddp.ddp.python_hook import hook_name
from mpiddp.torch_internals.compiler import skip_compilation
from mpiddp.torch_internals.versions import TorchWrapper

if TYPE_CHECKING:
    from mpiddp.ddp.torch_reducer import TorchReducer
    from mpiddp.process_group.group import ProcessGroup


@skip_compilation
class HookRegistration(TorchWrapper):
    """torch's wrapper with hooks that our reducer calls, or runs without Python. Collective."""

    process_group: ProcessGroup
    reducer: TorchReducer  # type: ignore[assignment]  # answers to the same calls as torch's
    logger: Logger
    _precision_on_cpu: Any

    @logs_errors
    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a hook reduce gradients, or change how they travel. Overrides torch's method.

        Collective: all ranks register the same hook, between two backward passes. With a hook
        the reducer does not divide by the number of ranks: the hook does that.

        These hooks are recognised and run without Python, see `mpiddp.compression`:
        `mpiddp.compression.fp16` and `bf16`, and `fp16_compress_hook`, `bf16_compress_hook` and
        `allreduce_hook` of ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``.

        Any other is called as ``hook(state, bucket)`` for each full bucket, in order of their
        indices, while backward runs. The reducer still sends which parameters have gradients, so
        every backward pass waits for all ranks whatever the hook does.

        Args:
            state: the hook's first argument. For recognised hooks: a process group, None for this
                module's; with another group they are called in Python too.
            hook: takes `state` and a `mpiddp.ddp.grad_bucket.GradBucket`, which has the methods of
                torch's, and returns a ``torch.futures.Future`` of one tensor of the shape of
                ``bucket.buffer()``. Chaining to the future of a collective of mpiddp waits for
                the collective: it then does not run beside backward.

        Raises:
            TypeError: `hook` is not callable.
            ValueError: `hook` is not annotated as a hook, or `state` is not what a recognised
                hook takes.
            RuntimeError: a hook is registered already, a backward pass is going on, or the ranks
                register different hooks (the error names them). In backward: the hook raised, or
                did not return such a future (the error names the bucket and its parameters).
        """
        comm_hooks.check_hook(hook)
        if self._comm_hooks or self._precision_on_cpu is not None:
            # Mixed precision has a hook of its own, in torch's class.
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        group = self.process_group
        if not comm_hooks.runs_in_python(hook, state, group):
            # A process group cannot be copied or pickled; None is the world.
            state = None if group is dist.group.WORLD else group
        self.reducer.agree_on_hook(self._travel_of(hook, state))
        self._install_hook(hook, state)
        self._comm_hooks.append((hook, state))

    def _travel_of(self, hook: Callable[..., Any], state: object) -> str:
        """Return how gradients travel with a hook, in words. Not collective."""
        if comm_hooks.runs_in_python(hook, state, self.process_group):
            return f"as {hook_name(hook)} does it"
        dtype = comm_hooks.wire_dtype(hook)
        return "as they are" if dtype is None else f"as {dtype}"

    def _install_hook(self, hook: Callable[..., Any], state: object) -> None:
        if self.reducer.travel is not None:
            self.reducer.travel = self._travel_of(hook, state)
        in_python = comm_hooks.runs_in_python(hook, state, self.process_group)
        if self.reducer.tuning is not None:
            self.reducer.tuning.take_hook(in_python)
        if in_python:
            # From the next time on that buckets are built, which is after the first backward.
            self.reducer.assign_buckets.size_limits = list(
                size_limits(self, self.reducer.channel, with_python=True)
            )
            self.reducer.call_hook(hook_caller(hook, state))
        else:
            self.reducer.compress(comm_hooks.wire_dtype(hook))
        self.logger._set_comm_hook_name(hook_name(hook))

    def _install_copied_hooks(self) -> None:
        """Install the hook of a wrapper that was copied or unpickled, or got another group."""
        hooks = self.__dict__.get("_comm_hooks", [])
        # Optimizers in backward belong to the parameters, and are not copied with them.
        hooks[:] = [
            (hook, state)
            for hook, state in hooks
            if hook is not optimizer_in_backward.step_on_mean or state() is self
        ]
        for hook, state in hooks:
            self._install_hook(hook, state)

    @logs_errors
    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register what a built-in hook of torch does. Collective, see `register_comm_hook`."""
        self.register_comm_hook(None, comm_hooks.builtin_hook(comm_hook_type))
        self.logger._set_comm_hook_name(str(comm_hook_type))

"""The reducer of a DistributedOptimizer: buckets go in backward, means are waited for in a step."""

from __future__ import annotations

from typing import Any

import torch

from mpiddp.ddp.torch_reducer import TorchReducer
from mpiddp.engine import forks
from mpiddp.mpi import uncaught
from mpiddp.reducer import deferred
from mpiddp.reducer.forward_passes import ForwardPasses
from mpiddp.torch_internals.compiler import skip_compilation

# What the reducer says of a gradient that comes once more, see raise_used_again in errors.py.
_READY_TWICE = "mark a variable ready only once"
TOO_MANY_PASSES = (
    "a gradient was computed in more backward passes than backward_passes_per_step before step() "
    "or synchronize(): raise backward_passes_per_step of the DistributedOptimizer to accumulate "
    "gradients, or call step() after each pass"
)


class _Taken:
    """A gradient as it was when it was taken, to see whether it is changed. Not collective."""

    __slots__ = ("gradient", "sample", "version")

    def __init__(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient
        self.version = gradient._version
        sample = _sample(gradient)
        self.sample = None if sample is None else sample.clone()

    def is_unchanged(self, gradient: torch.Tensor | None) -> bool:
        """Whether it is still the same, and so are the elements that were looked at."""
        if gradient is not self.gradient or gradient._version != self.version:
            return False
        # GradScaler's operation leaves the version as it is.
        sample = _sample(gradient)
        return sample is None or self.sample is None or torch.equal(sample, self.sample)


def _sample(gradient: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of some elements, if these are easily had."""
    if not gradient.is_contiguous() or gradient.is_conj() or gradient.is_neg():
        return None
    return gradient.detach().view(-1)[:16].view(torch.uint8)


@skip_compilation
class OptimizerReducer(TorchReducer):
    """A reducer whose gradients are complete after `finish`, see Note [Deferred end].

    Collective, as `mpiddp.reducer.reducer.Reducer`.

    Args:
        arguments: those of `Reducer`.
        passes: how many backward passes each gradient has before it is reduced.
        compression: the 16-bit dtype in which float32 and float64 travel, or None.
        python_hook: what moves the gradients instead of the engine, or None.
        divisor: what sums over ranks are divided by.
        settings: those of `Reducer`.

    Attributes:
        in_flight: whether a backward pass has run since the last `finish`.
    """

    in_flight = False
    travel = None

    def __init__(
        self,
        *arguments: Any,
        passes: int,
        compression: torch.dtype | None,
        python_hook: Any,
        divisor: float,
        **settings: Any,
    ) -> None:
        # Before the buckets are made, or they would be made twice.
        self.compression = compression
        self.python_hook = python_hook
        # Of what was taken in this step, some gradients by parameter index.
        self._taken: dict[int, _Taken] = {}
        super().__init__(*arguments, **settings)
        self.set_divisor(divisor)
        self.keep_buckets()
        self.passes = ForwardPasses()  # of none: nothing here calls a forward
        self.set_passes(passes)

    def set_passes(self, passes: int) -> None:
        """Expect each gradient in that many backward passes from now on. Not collective."""
        deferred.set_passes(self, passes)
        self._expect()

    def resume(self) -> None:
        """Expect gradients of this rank again, after it has stood in for others. Not collective."""
        self._expect()

    def _expect(self) -> None:
        self._taken.clear()
        self.in_flight = False
        self.prepare_for_backward([])

    def end_of_backward(self) -> None:
        """Wait for nothing, but note what was taken. Autograd's final callback. Not collective."""
        self.in_flight = True
        deferred.end_of_backward(self)
        if len(self._taken) < len(self.buckets):
            for index in deferred.taken(self):
                gradient = self.parameters[index].grad
                if index not in self._taken and gradient is not None:
                    self._taken[index] = _Taken(gradient)

    def finish(self) -> None:
        """Reduce what is left, wait, and write the means. Collective.

        Raises:
            RuntimeError: it was called within a backward pass; a gradient was changed after it had
                been taken; or what `Reducer.end_of_backward` raises.
        """
        forks.check("step or synchronize of a DistributedOptimizer")
        uncaught.take_part()
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"rank {self.process_group.me}: step() or synchronize() of a "
                f"DistributedOptimizer was called within a backward pass: call it afterwards"
            )
        self._refuse_changes()
        with torch.no_grad():
            deferred.take_rest(self)
            super().end_of_backward()
        self._expect()

    def _refuse_changes(self) -> None:
        """Raise if a gradient is not what has been sent: the change would be lost."""
        for index, taken in self._taken.items():
            if not taken.is_unchanged(self.parameters[index].grad):
                raise RuntimeError(
                    f"rank {self.process_group.me}: the gradient of "
                    f"{self.describe_parameter(index)} was changed between backward and "
                    f"synchronize(), while it was being averaged. To clip or unscale gradients, "
                    f"call optimizer.synchronize() first and step() inside of `with "
                    f"optimizer.skip_synchronize():` afterwards"
                )

    def note_error(self, error: Exception) -> None:
        """Raise Horovod's kind of error for a backward pass too many. Not collective."""
        if _READY_TWICE in str(error):
            raise AssertionError(f"rank {self.process_group.me}: {TOO_MANY_PASSES}") from error

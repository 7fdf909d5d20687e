"""The reducer with all methods that torch's wrapper calls.

Methods that are called at most once an iteration, and need no speed, are here; the path of the
gradients is in reducer.pyx.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mpiddp.ddp.hook_agreement import HookAgreement
from mpiddp.ddp.same_bits import check_of
from mpiddp.ddp.second_backward import SecondBackward
from mpiddp.reducer import bucket_progress, static_graph, unused
from mpiddp.reducer.backward_kinds import accumulates
from mpiddp.reducer.errors import raise_second_backward
from mpiddp.reducer.reducer import Reducer
from mpiddp.torch_internals.compiler import skip_compilation
from mpiddp.torch_internals.profiling import BucketEvents, is_profiling, searching_unused_parameters

if TYPE_CHECKING:
    from mpiddp.ddp.bucket_tuning import BucketTuning
    from mpiddp.ddp.grad_bucket import GradBucket
    from mpiddp.ddp.kept_parameters import KeptParameters
    from mpiddp.ddp.logger import Logger
    from mpiddp.ddp.mixed_precision import NarrowParameters
    from mpiddp.ddp.python_hook import PythonHook


Method = TypeVar("Method", bound=Callable[..., Any])


def _notes_errors(method: Method) -> Method:
    """Let a method of a reducer record what it raises."""

    @functools.wraps(method)
    def noting(self: TorchReducer, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            self.note_error(error)
            raise

    return noting  # type: ignore[return-value]


@skip_compilation
class TorchReducer(Reducer):
    """A `Reducer` that takes the place of torch's C++ Reducer in torch's wrapper."""

    logger: weakref.ref[Logger] | None = None
    # Given by the process group: which of its wrapped modules this is, see wrapped_modules.py.
    number: int
    module_name: str
    joins = False  # whether it is, or was, within join()
    narrow_parameters: NarrowParameters | None = None  # in mixed precision on the CPU
    kept: KeptParameters | None = None  # None: it has no hooks any more
    _unused_before: Sequence[int] | None = None
    _unused_changed = False
    # What static_graph.pyx calls learning.
    _learning = False
    # The graph task in which this backward has reached an output of the module; -1: none yet.
    _began_in = -1
    # The node of the backward in which the last forward has run; None: outside of any.
    _forward_in: torch.autograd.graph.Node | None = None
    _second_backward: SecondBackward | None = None
    # How gradients travel, in words; None: the ranks have been asked, or cannot differ.
    travel: str | None = "without a hook"
    asked: Any = None  # what `mpiddp.metrics` keeps here
    tuning: BucketTuning | None = None  # what measures bucket sizes
    # Whether any reducer of this process has averaged gradients.
    has_averaged = False

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.same_bits = check_of()

    def compress(self, dtype: torch.dtype | None) -> None:
        """Let float32 and float64 gradients travel as `dtype`, see Note [Compression].

        Collective, unless `dtype` is None, for no compression.

        Raises:
            RuntimeError: a backward pass is going on, or did not end.
        """
        self._refuse_hook_in_backward()
        self.compression = dtype
        if dtype is not None:
            self._build_buckets([bucket.parameter_indices for bucket in self.buckets])

    def call_hook(self, python_hook: PythonHook) -> None:
        """Let an `mpiddp.ddp.python_hook.PythonHook` reduce gradients, see Note [Hooks in Python].

        Collective.

        Raises:
            RuntimeError: a backward pass is going on, or did not end.
        """
        self._refuse_hook_in_backward()
        self.python_hook = python_hook
        self._build_buckets([bucket.parameter_indices for bucket in self.buckets])

    def _refuse_hook_in_backward(self) -> None:
        # A user's hook may run before the first gradient is ready.
        if self.ready or (self.expecting and torch._C._current_graph_task_id() != -1):
            raise RuntimeError(
                "a communication hook cannot be registered during a backward pass, nor after "
                "one that did not end"
            )

    def begin_agreement(self) -> None:
        """Begin to compare how gradients travel, unless that was done. Collective.

        `wait_for` of the first bucket looks at it, see Note [A hook on some ranks].
        """
        # A bucket that can be waited for is the one that counts forward passes.
        if self.travel is None or self.process_group.size() == 1 or self.counting < 0:
            return
        self.agreement = HookAgreement(self, self.travel)
        self.travel = None

    def _before_reduction(self) -> None:
        if not self.reductions:
            self.begin_agreement()
        elif self.comparison is not None:
            self.comparison.begin()

    def reach_agreement(self) -> None:
        """Compare how gradients travel before buffers are copied, unless that was done. Collective.

        Raises:
            RuntimeError: they do not travel alike, or not all ranks came within the group's
                timeout.
        """
        self.begin_agreement()
        agreement, self.agreement = self.agreement, None
        seconds = self.process_group.timeout.total_seconds()
        if agreement is not None and not agreement.wait(seconds):
            raise self.process_group.timed_out("the copy of buffers", seconds, 0)

    def agree_on_hook(self, travel: str) -> None:
        """Raise on all ranks unless they register a hook of the same effect. Collective.

        Raises:
            RuntimeError: they do not, or not all ranks came within the group's timeout.
        """
        group = self.process_group
        seconds = group.timeout.total_seconds()
        if group.size() > 1 and not HookAgreement(self, travel).wait(seconds):
            raise group.timed_out("register_comm_hook", seconds, 0)

    # What the process group calls, see wrapped_modules.py.

    buckets_filled = bucket_progress.filled
    describe_progress = bucket_progress.describe_progress
    describe_wait = bucket_progress.describe_wait

    # What torch's wrapper calls.

    @_notes_errors
    def prepare_for_forward(self) -> None:
        """Begin an iteration whose gradients are to be reduced, as in `Reducer`."""
        self._allow_backward()
        if self.ends_by_hand and self.expecting and self.next_bucket == len(self.buckets):
            raise RuntimeError(
                f"rank {self.process_group.me}: the last backward was not finalized. With "
                f"require_manual_backward_finalization call finalize_backward() after it, and "
                f"before the next forward"
            )
        super().prepare_for_forward()

    @_notes_errors
    def _rebuild_buckets(self) -> bool:
        """Lay the buckets out again, or report what was missing, as in `Reducer`. Collective."""
        self._allow_backward()
        rebuilt = super()._rebuild_buckets()
        if self.tuning is not None and self.tuning.goes_on:
            rebuilt = self.tuning.advance() or rebuilt
        return rebuilt

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """Expect a backward whose gradients are to be reduced, as in `Reducer`."""
        if self.kept is not None:
            self.kept.check()
        self._began_in = -1
        self._forward_in = torch._C._current_autograd_node()
        self.profile = None
        if self.process_group.shows_calls and self.python_hook is None:
            from mpiddp.ddp.shown_buckets import ShownBuckets  # which would initialise MPI

            self.profile = ShownBuckets(self)
        if not is_profiling():
            super().prepare_for_backward(outputs)
            return
        if self.python_hook is None:  # else the hook's own operations are profiled
            self.profile = BucketEvents() if self.profile is None else self.profile.profiled()
        with searching_unused_parameters(self.find_unused_parameters):
            super().prepare_for_backward(outputs)

    @_notes_errors
    def _backward_begins(self, gradient: torch.Tensor) -> None:
        """Note where backward reaches an output of the module, as in `Reducer`. Not collective.

        Raises:
            RuntimeError: it is the second one of a forward, and reaches other parameters.
        """
        if not self.expecting:
            self._refuse_late_gradients()
        elif not self.static_graph or any(p.requires_grad for p in self.parameters):
            super()._backward_begins(gradient)
            if self.callback_queued and self._began_in < 0:
                self._began_in = torch._C._current_graph_task_id()

    def _refuse_late_gradients(self) -> None:
        if not self.reductions:
            return
        late = [
            index
            for index, parameter in enumerate(self.parameters)
            if not (self.expect_sparse[index] or self.was_used_anywhere(index))
            and accumulates(parameter)
        ]
        if late:
            raise_second_backward(late, self.process_group.me, self.describe_parameter)

    @_notes_errors
    def end_of_backward(self) -> None:
        """Launch what is left, and write the means, as in `Reducer`. Collective.

        Also where the whole backward, from the module's outputs on, was nested in another one.
        """
        if self.expecting and self.ready < len(self.parameters):
            node = torch._C._current_autograd_node()
            nested = node is not None
            # A pass within the module's own backward comes after the one that began at its outputs,
            # and is nested in another node than the forward.
            if (
                not nested
                or node is self._forward_in
                or self._began_in >= torch._C._current_graph_task_id()
            ):
                if nested:
                    if self.narrow_parameters is not None:
                        self.narrow_parameters.widen()
                    (static_graph.learn if self._learning else unused.contribute)(self)
                self._learning = False
        super().end_of_backward()

    def finish_backward(self) -> None:
        """Wait for the buckets and write the means, as in `Reducer`. Collective."""
        if is_profiling():
            with torch.profiler.record_function("mpiddp:wait at the end of backward"):
                super().finish_backward()
        else:
            super().finish_backward()
        self._forward_in = None
        if not TorchReducer.has_averaged:
            TorchReducer.has_averaged = True
        if self.missing and self.kept is not None:  # Horovod's optimizer has several passes
            self._second_backward = SecondBackward(self)
        if self.find_unused_parameters:
            before, self._unused_before = self._unused_before, self.unused
            self._unused_changed |= before is not None and before != self.unused
        if self.same_bits is not None:
            self.same_bits(self)

    def _remove_autograd_hooks(self) -> None:
        """Take the hooks off the parameters, as in `Reducer`. Not collective."""
        self.kept = None
        self._allow_backward()
        super()._remove_autograd_hooks()

    def _allow_backward(self) -> None:
        if self._second_backward is not None:
            self._second_backward.remove()
            self._second_backward = None

    def _set_manual_finalization_required(self, required: bool) -> None:
        """Leave the end of each backward to `_finalize_backward_manual`, or no longer.

        Not collective, but the same on all ranks.

        Raises:
            RuntimeError: a backward is expected, or under way.
        """
        if required != self.ends_by_hand and self.expecting:
            raise RuntimeError(
                "require_manual_backward_finalization can be set before forward or after the end "
                "of backward, not between them"
            )
        self.ends_by_hand = required

    def _should_finalize_after_backward(self) -> bool:
        """Return whether the end of the next backward must wait until backward has returned.

        Not collective. While buckets are not laid out yet; and with `find_unused_parameters`,
        since unused ones are known when backward ends.
        """
        return not self.has_rebuilt_buckets or self.find_unused_parameters

    @_notes_errors
    def _finalize_backward_manual(self) -> None:
        """Wait for the buckets and write the means, at the caller's moment. Collective.

        Raises:
            RuntimeError: nobody asked for that; there is nothing to finalize; or some gradient is
                not there yet.
        """
        rank = self.process_group.me
        if not self.ends_by_hand:
            raise RuntimeError(
                f"rank {rank}: finalize_backward() needs require_manual_backward_finalization = "
                f"True, set before the forward"
            )
        if not self.expecting or (self.ready == 0 and not self.callback_queued):
            raise RuntimeError(
                f"rank {rank}: there is no gradient reduction to finalize: no backward has run "
                f"since the last one, or it was within no_sync()"
            )
        if self.next_bucket < len(self.buckets):
            raise RuntimeError(
                f"rank {rank}: finalize_backward() was called before all gradients are there: "
                f"{self.next_bucket} of {len(self.buckets)} buckets are full. Where "
                f"should_finalize_after_backward is True, call it after backward() has returned"
            )
        with torch.no_grad():
            self.finish_backward()

    def _ddp_graph_static(self) -> bool:
        """Return whether the same parameters were unused in each backward so far.

        Not collective. Known with `find_unused_parameters`, else True.
        """
        return not self._unused_changed

    def _get_local_used_map(self) -> torch.Tensor:
        """Return how many ranks have used each parameter in the last backward.

        Collective, unlike in torch's class: here only the caller needs it.
        """
        used = torch.ones(len(self.parameters), dtype=torch.int32, device="cpu")
        used[list(self.unused)] = 0
        self.process_group.allreduce([used]).wait()
        return used

    @_notes_errors
    def _check_reducer_finalized(self) -> None:
        """Raise RuntimeError unless the last backward was reduced to its end. Not collective."""
        if self.expecting:
            raise RuntimeError(
                "Expected to have finished reduction: backward() was not called since the last "
                "forward pass, or did not end."
            )

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        """Divide by the number of ranks that have not joined, unless the divisor is static.

        Not collective.

        Args:
            work: of a sum over ranks, to which each rank that has not joined adds 1.
            use_static_world_size: whether to divide by the size of the group instead.
        """
        if not use_static_world_size:
            work.wait()
            self.set_divisor(work.get_future().value()[0].item())

    def _push_all_rebuilt_params(self) -> None:
        """Keep the guessed order on a rank whose own backward passes show none.

        Not collective.
        """
        if not self.has_rebuilt_buckets and len(self.arrival_order) < len(self.parameters):
            self.arrival_order = [
                index for bucket in self.buckets for index in bucket.parameter_indices
            ]

    @_notes_errors
    def _set_static_graph(self) -> None:
        """Count in the first backward how often each hook runs, see static_graph.pyx.

        Not collective, but the same on all ranks.

        Raises:
            RuntimeError: there was a forward pass already.
        """
        static_graph.begin(self)
        self._learning = True

    def _run_comm_hook(self, bucket: GradBucket) -> Any:
        """Call the hook for a GradBucket and return its future. Collective if the hook is."""
        return (self.python_hook or self._run_allreduce_hook)(bucket)

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Sum the buffer of a GradBucket over all ranks in place; return a future of it.

        Collective.
        """
        work = self.process_group.allreduce([bucket.buffer()])
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(
            lambda future: future.value()[0]
        )
        return future

    def _install_post_backward_futures(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Wait for `futures` too at the end of the next backward. Not collective."""
        self.post_backward_futures.extend(futures)

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype | None) -> None:
        """Do nothing: the constructor was told. Not collective."""

    def _autograd_hook(self, index: int) -> None:
        """Do nothing: parameter `index` has a hook of the reducer's own. Not collective.

        torch's wrapper calls this in mixed precision, when it has swapped its parameters' data:
        that makes new graph nodes, but hooks of parameters stay.
        """

    def set_logger(self, logger: Logger) -> None:
        """Remember the wrapper's logger (weakly). Not collective."""
        self.logger = weakref.ref(logger)

    def note_error(self, error: Exception) -> None:
        """Record an error that is about to be raised in the logging data. Not collective."""
        logger = None if self.logger is None else self.logger()
        if logger is not None:
            logger.set_error_and_log(str(error))

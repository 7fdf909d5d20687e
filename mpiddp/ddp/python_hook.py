"""Run a communication hook written in Python for each bucket, and check its result."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.ddp.grad_bucket import GradBucket
from mpiddp.reducer.futures import completed

if TYPE_CHECKING:
    from mpiddp.reducer.bucket import Bucket
    from mpiddp.reducer.state import ReducerState

Hook = Callable[..., Any]

_FILES_OF_WAITING = (__file__, torch.futures.__file__)


def hook_name(hook: Hook) -> str:
    """Return what to call a hook in errors and logs. Not collective."""
    return str(getattr(hook, "__qualname__", None) or repr(hook))


class PythonHook:
    """One registered hook, with the futures of the buckets in flight.

    Args:
        hook: called with `state` and a GradBucket; returns a future of the bucket's result.
        state: the hook's own.
    """

    def __init__(self, hook: Hook, state: object) -> None:
        self.hook = hook
        self.state = state
        self._futures: dict[int, Any] = {}

    def __call__(self, bucket: GradBucket) -> Any:
        """Call the hook as it is. Collective if the hook is."""
        return self.hook(self.state, bucket)

    def launch(self, reducer: ReducerState, bucket: Bucket) -> None:
        """Call the hook for a full bucket and keep its future. Collective if the hook is.

        Raises:
            RuntimeError: the hook raised, or returned no future; the error names the bucket.
        """
        parameters = [reducer.parameters[index] for index in bucket.parameter_indices]
        buffer = _sparse_gradient(parameters[0]) if bucket.sparse else _flat(bucket)
        # A new tensor over the gradients' memory: hooks resize it.
        seen = GradBucket(bucket.index, buffer.detach(), parameters, bucket is reducer.buckets[-1])
        try:
            future = self(seen)
        except Exception as error:
            raise self._failure("raised", reducer, bucket, error) from error
        if not isinstance(future, torch._C.Future):
            raise RuntimeError(
                f"{self._subject(reducer, bucket)}: DDP communication hook's callback must "
                f"return a torch.futures.Future object, but got {_type_name(future)}"
            )
        self._futures[bucket.index] = future

    def finish(self, reducer: ReducerState, bucket: Bucket) -> torch.Tensor:
        """Wait for a bucket that was launched; write the result to its gradients.

        Not collective. A sparse result is only returned.

        Raises:
            RuntimeError: the future failed, took too long, or gave something other than a tensor
                of the buffer's shape and of a dtype that can be cast to the gradients'; the error
                names the bucket.
        """
        future = self._futures.pop(bucket.index)
        # The hook's own operations have the same limit, and their errors say more.
        if not completed(future, reducer.process_group.timeout + timedelta(seconds=1)):
            raise RuntimeError(
                f"{self._subject(reducer, bucket)}: the future that it returned has not completed "
                f"within {reducer.process_group.timeout.total_seconds():g} s. Likely causes: a "
                f"rank skipped this backward pass or has failed, or nothing sets the future's "
                f"result."
            )
        try:
            result = future.wait()
        except Exception as error:
            # Torch keeps what set_exception() was given in the future: with this frame in its
            # traceback they would keep each other alive, and the module.
            error.__traceback__ = _before_waiting(error.__traceback__)
            raise self._failure("returned a future that failed with", reducer, bucket, error) from (
                error
            )
        if bucket.sparse:
            expected = _sparse_gradient(reducer.parameters[bucket.parameter_indices[0]])
        else:
            expected = bucket.gradients
            result = _as_complex(result, expected)
        if (
            not isinstance(result, torch.Tensor)
            or result.shape != expected.shape
            or result.layout is not expected.layout
            or not torch.can_cast(result.dtype, expected.dtype)
        ):
            raise RuntimeError(
                f"{self._subject(reducer, bucket)}: its future must give one tensor like "
                f"bucket.buffer(), {_kind(expected)}, but gave {_kind(result)}"
            )
        if not bucket.sparse:
            _write_to(bucket, result)
        return result

    def _subject(self, reducer: ReducerState, bucket: Bucket) -> str:
        return (
            f"rank {reducer.process_group.me}: the communication hook {hook_name(self.hook)}, "
            f"called for {reducer.describe_bucket(bucket)}"
        )

    def _failure(
        self, did: str, reducer: ReducerState, bucket: Bucket, error: Exception
    ) -> RuntimeError:
        return RuntimeError(
            f"{self._subject(reducer, bucket)}, {did} {type(error).__name__}: {error}"
        )


def _before_waiting(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of an error's traceback from before `wait` of its future raised it."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _FILES_OF_WAITING:
        traceback = traceback.tb_next
    return traceback


def _sparse_gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter, layout=torch.sparse_coo)
    return parameter.grad


def _flat(bucket: Bucket) -> torch.Tensor:
    """Return all gradients of a bucket end to end, each as if it were contiguous.

    They lie like that already unless a parameter is not contiguous, say in channels_last. Even
    then torch gives hooks the memory as it is, with elements in the wrong places.
    """
    if all(view.is_contiguous() for view in bucket.views):
        return bucket.gradients
    return torch.cat([view.reshape(-1) for view in bucket.views])


def _write_to(bucket: Bucket, result: torch.Tensor) -> None:
    """Write a hook's result for `_flat` to the gradients of a bucket."""
    with torch.no_grad():
        if not all(view.is_contiguous() for view in bucket.views):
            parts = torch.split(result, [view.numel() for view in bucket.views])
            for view, part in zip(bucket.views, parts, strict=True):
                view.copy_(part.view(view.shape))
        elif (
            result.data_ptr() != bucket.gradients.data_ptr()
            or result.dtype is not bucket.gradients.dtype
            or not result.is_contiguous()
        ):
            bucket.gradients.copy_(result)


def _as_complex(result: Any, expected: torch.Tensor) -> Any:
    """Return pairs of real numbers, which torch.distributed makes of complex ones, as complex."""
    if (
        isinstance(result, torch.Tensor)
        and expected.is_complex()
        and result.is_floating_point()
        and result.shape == (*expected.shape, 2)
    ):
        return torch.view_as_complex(result)
    return result


def _kind(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return _type_name(value)
    layout = "" if value.layout is torch.strided else f", {value.layout}"
    return f"shape {tuple(value.shape)}, {value.dtype}{layout}"


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")

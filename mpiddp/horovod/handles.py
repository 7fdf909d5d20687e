"""The handles of asynchronous operations, which users poll and wait for."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from mpiddp.horovod.agreement import Agreement
from mpiddp.horovod.execution import Submission

__all__ = ["forget_all", "poll", "submit", "synchronize"]

_open: dict[int, tuple[Agreement, Submission]] = {}
_numbers = itertools.count(1)


def submit(agreement: Agreement, submission: Submission) -> int:
    """Submit an operation, and return its handle. Not collective."""
    agreement.submit(submission)
    handle = next(_numbers)
    _open[handle] = agreement, submission
    return handle


def poll(handle: int) -> bool:
    """Return whether an operation has ended, so that `synchronize` would not wait.

    Not collective.

    Args:
        handle: what the asynchronous operation returned.

    Raises:
        ValueError: there is no such handle, or its result was taken already.
    """
    known = _open.get(handle)
    if known is None:
        raise ValueError(f"there is no handle {handle!r}, or it was synchronized already")
    agreement, submission = known
    return agreement.poll(submission)


def synchronize(handle: Any) -> Any:
    """Wait for an operation and return its result. Not collective.

    Args:
        handle: what the asynchronous operation returned. A second call returns None, as in Horovod.

    Raises:
        HorovodInternalError: the operation failed, on this rank or because ranks differed.
    """
    if callable(handle):  # that of a sparse all-reduce
        return handle()
    known = _open.get(handle)
    if known is None:
        return None
    agreement, submission = known
    agreement.wait(submission)
    _open.pop(handle, None)
    if submission.error is not None:
        raise submission.error
    if submission.stream is not None:
        torch.cuda.current_stream(submission.stream.device).wait_stream(submission.stream)
    return None if submission.result is None else submission.result(submission)


def forget_all() -> None:
    """Forget all handles, when Horovod ends. Not collective."""
    _open.clear()

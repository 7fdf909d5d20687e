"""Events in torch's profiler that begin here and end elsewhere, like those of torch's own backends.

torch takes an event for asynchronous if it begins in one thread and ends in another. So a thread
that does nothing else ends them. Nothing here costs anything while no profiler runs.
"""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["BucketEvents", "Event", "is_profiling", "searching_unused_parameters"]

# What torch calls the event in which its reducer looks for parameters without a gradient.
_SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"


def is_profiling() -> bool:
    """Return whether a profiler of torch runs. Not collective."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


class Event:
    """One event, which begins now. Not collective.

    Args:
        name: such as "all_reduce"; the profiler sees it as "mpiddp:all_reduce".
    """

    def __init__(self, name: str) -> None:
        self._future: torch.futures.Future[None] | None = torch.futures.Future()
        profiler = torch.ops.profiler
        event = profiler._record_function_enter_new(f"mpiddp:{name}", None)
        # Lets the thread that completes the future see the profiler of this one.
        profiler._call_end_callbacks_on_jit_fut._RecordFunction(event, self._future)

    def end(self) -> None:
        """End it. Harmless when called twice."""
        future, self._future = self._future, None
        if future is not None:
            # Waited for: the profiler may be stopped next.
            _ending_thread().submit(future.set_result, None).result()


class BucketEvents:
    """The reductions of gradient buckets in one backward, as all-reduces. Not collective."""

    def __init__(self) -> None:
        self._events: dict[int, Event] = {}

    def begin(self, index: int) -> None:
        """Note that bucket number `index` is launched."""
        self._events[index] = Event("all_reduce")

    def end(self, index: int) -> None:
        """Note that it was reduced, if its launch was noted."""
        event = self._events.pop(index, None)
        if event is not None:
            event.end()


def searching_unused_parameters(wanted: bool) -> contextlib.AbstractContextManager[object]:
    """Return a context for the search for unused parameters before a backward.

    Args:
        wanted: whether to let the profiler see it.
    """
    return torch.profiler.record_function(_SEARCH) if wanted else contextlib.nullcontext()


@functools.cache
def _ending_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="mpiddp profiler")

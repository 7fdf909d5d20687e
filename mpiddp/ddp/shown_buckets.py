"""Show the reduction of each bucket to the hooks of its process group, as an all-reduce.

torch's reducer calls the group for each bucket; ours calls the engine, which knows no group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpiddp.process_group.call_hooks import Call
from mpiddp.torch_internals.profiling import BucketEvents

if TYPE_CHECKING:
    from mpiddp.reducer.state import ReducerState

__all__ = ["ShownBuckets"]


class ShownBuckets:
    """The reductions of the buckets of `reducer` in one backward. Not collective."""

    def __init__(self, reducer: ReducerState) -> None:
        self._reducer = reducer
        self._under_way: dict[int, tuple[Call, int]] = {}
        self._events: BucketEvents | None = None

    def profiled(self) -> ShownBuckets:
        """Return this object, which shows them to torch's profiler as well from now on."""
        self._events = BucketEvents()
        return self

    def begin(self, index: int) -> None:
        """Call the hooks that come before bucket number `index` is launched."""
        call = Call("ALLREDUCE", [self._reducer.buckets[index].gradients])
        number = self._reducer.process_group.begin_call(call, True)
        self._under_way[index] = (call, number)
        if self._events is not None:
            self._events.begin(index)

    def end(self, index: int) -> None:
        """Call the hooks that come after, if it was launched here."""
        if self._events is not None:
            self._events.end(index)
        call, number = self._under_way.pop(index, (None, 0))
        if call is not None:
            self._reducer.process_group.end_call(call, True, number)

"""Say after a while what this rank waits for, and for whom, long before the time limit is over.

It has no thread of its own: the one of roll_call.py looks twice a second at the oldest operation
or bucket that has not ended. Time in which this thread did not run does not count: then the job was
stopped.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from mpiddp import settings
from mpiddp.flight_recorder import ring
from mpiddp.flight_recorder.call_text import describe
from mpiddp.flight_recorder.sources import BUCKETS

if TYPE_CHECKING:
    from mpiddp.process_group.interface import RunningGroup
    from mpiddp.process_group.roll_call import RollCall

__all__ = ["Watchdog"]

# What a look counts at most: in more seconds since the last one this process did not run, or asked.
_LONGEST = 2.0


class Watchdog:
    """Watches the waits of one process. Not collective.

    Args:
        roll_call: whose thread looks, and which asks other ranks.
    """

    def __init__(self, roll_call: RollCall) -> None:
        self._limit: float = settings.STALL_SECONDS.read()
        self._roll_call = roll_call
        self._looked = time.monotonic()
        self._record = -1
        # Seconds in which the record was the oldest, and after which it is spoken of.
        self._waited, self._next = 0.0, self._limit
        roll_call.watches.append(self.look)

    def look(self) -> None:
        """Look at what is waited for, and say it if it is time."""
        now = time.monotonic()
        elapsed, self._looked = min(now - self._looked, _LONGEST), now
        oldest = ring.oldest()
        if oldest is None or oldest[0] != self._record:
            self._record = -1 if oldest is None else oldest[0]
            self._waited, self._next = 0.0, self._limit
            return
        self._waited += elapsed
        if self._waited < self._next:
            return
        self._next *= 2
        for group in self._roll_call.groups():
            told = self._explain(group, oldest)
            if told:
                with contextlib.suppress(Exception):  # a stream that takes nothing
                    print(told, file=sys.stderr, flush=True)

    def _explain(self, group: RunningGroup, record: ring.Record) -> str:
        """Return what to say if `group` is the record's and this rank is to say it, else ""."""
        source, number, call = record[1:4]
        if source == group.source.number and call is not None:
            module, what = 0, describe(call)
        else:
            for each in group.modules.all():
                if each.record_source == source:
                    break
            else:
                return ""
            backward, bucket = divmod(number, BUCKETS)
            module, number = each.number, number + 1
            what = f"bucket {bucket} of backward pass {backward + 1} of {each.module_name}"
        missing = self._roll_call.explain_stall(group, module, number)
        if missing is None or ring.oldest() is None:
            return ""
        return (
            f"mpiddp: rank {group.world_ranks[group.rank()]}: {what} on process group "
            f"{group.group_name or 'world'!r} has waited {self._waited:.0f} s for other ranks. "
            f"{missing}. It goes on waiting, until "
            f"{group.timeout.total_seconds():g} s are over ({settings.STALL_SECONDS.name}=none: "
            f"say nothing)"
        )

"""Say after a while what this rank waits for, and for whom, long before the time limit is over.

It has no thread of its own: the one of roll_call.py looks twice a second at the oldest operation
or bucket that has not ended. Time in which this thread did not run does not count: then the job was
stopped.

Most waits have a time limit of their own, and raise an error. Where MPI waits without one, the
watchdog ends the job when the group's time limit is over.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpiddp import settings
from mpiddp.flight_recorder import files, ring
from mpiddp.flight_recorder.call_text import describe
from mpiddp.flight_recorder.sources import BUCKETS
from mpiddp.mpi.abort import abort_job

if TYPE_CHECKING:
    from mpiddp.watch.interface import CountedGroup
    from mpiddp.watch.roll_call import RollCall

__all__ = ["Watchdog", "ended_with_block", "limited"]

# What a look counts at most: in more seconds since the last one this process did not run, or asked.
_LONGEST = 2.0
# Seconds after the time limit in which an operation within may raise an error, and one of the first
# ranks may end the job.
_GRACE = 3.0
_STAGGER = 3.0


@contextlib.contextmanager
def ended_with_block(record: int) -> Iterator[None]:
    """End a record with the block, however it ends: else it would be the oldest for ever.

    Not collective.
    """
    try:
        yield
    except BaseException:
        ring.failed(record)
        raise
    ring.ended(record)


@contextlib.contextmanager
def limited(group: CountedGroup, record: int) -> Iterator[None]:
    """Let the watchdog end the job if what runs within takes longer than the group's time limit.

    Not collective. For calls of MPI that wait for other ranks and have no limit of their own.

    Args:
        group: whose collective it is.
        record: of it, in the flight recorder; it ends with the block.
    """
    group.without_limit.add(record)
    try:
        with ended_with_block(record):
            yield
    finally:
        group.without_limit.discard(record)


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
        groups = self._roll_call.groups()
        for group in groups:
            if oldest[0] in group.without_limit:
                self._end_if_over(group, oldest)
        if self._waited < self._next:
            return
        self._next *= 2
        for group in groups:
            told = self._explain(group, oldest)
            if told:
                with contextlib.suppress(Exception):  # a stream that takes nothing
                    print(told, file=sys.stderr, flush=True)

    def _end_if_over(self, group: CountedGroup, record: ring.Record) -> None:
        """End the job if a record without a limit of its own has waited longer than the group's."""
        limit = group.timeout.total_seconds() + _GRACE
        if self._waited < limit:
            return
        words = self._explain(group, record)
        if not words and self._waited < limit + _STAGGER:
            return  # one of the first ranks waits too, and speaks
        words = words or f"mpiddp: rank {group.world_ranks[group.rank()]}: a time limit is over"
        words += f". {files.dump_for(words)}"
        abort_job(1, lambda: print(words.rstrip(), file=sys.stderr, flush=True))

    def _explain(self, group: CountedGroup, record: ring.Record) -> str:
        """Return what to say if `group` is the record's and this rank is to say it, else ""."""
        source, number, call = record[1:4]
        if source == group.source.number and call is not None:
            module, what = 0, describe(call)
            if record[0] in group.without_limit:
                # What of it waits now.
                inner = _next_under_way(record)
                if inner is not None and inner[3] is not None:
                    number, what = inner[2], f"{describe(inner[3])} in the {what}"
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
        limit = group.timeout.total_seconds()
        then = (
            f"It goes on waiting, until {limit:g} s are over ({settings.STALL_SECONDS.name}=none: "
            f"say nothing)"
        )
        if record[0] in group.without_limit and self._waited > limit:
            then = f"The time limit of {limit:g} s is over, and the job ends"
        name = group.group_name or "world"
        where = "" if name == what else f" on process group {name!r}"
        return (
            f"mpiddp: rank {group.world_ranks[group.rank()]}: {what}{where} has waited "
            f"{self._waited:.0f} s for other ranks. {missing}. {then}"
        )


def _next_under_way(record: ring.Record) -> ring.Record | None:
    """Return the next record of the same group that has not ended."""
    later = (each for each in ring.snapshot() if each[0] > record[0] and each[8] == 0)
    return next((each for each in later if each[1] == record[1]), None)

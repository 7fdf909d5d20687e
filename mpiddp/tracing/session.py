"""Begin and end a trace: on all ranks at the same reduction.

Note [The end of a trace]
~~~~~~~~~~~~~~~~~~~~~~~~~
All ranks end it together, since they compare their clocks again: after the last of its steps, in
the reduction that they have just done together; where its block ends; or in destroy_process_group,
torch's or ours. With uneven inputs (join) a rank may end a reduction when the others have gone on,
so there it is not the number of steps that ends it. A rank that ends in another way, by an
exception or without destroy_process_group, writes its own file by itself, and nobody waits for it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mpiddp import settings
from mpiddp.mpi import communicators, losses
from mpiddp.mpi.abort import call_before_abort
from mpiddp.rendezvous import companion, world
from mpiddp.torch_internals.patching import replace_function
from mpiddp.tracing import merging, rank_file
from mpiddp.tracing.clocks import Clock, Meeting
from mpiddp.tracing.collector import Collector

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Trace", "follow_world", "trace"]

# Seconds that a rank waits for the others at the end; then it ends alone.
_PATIENCE = 60.0

# The one that is on, if any.
_on: Trace | None = None
_watches_aborts = False


class Trace:
    """One trace, from its making to `end` or `leave`.

    Collective over the world. Args as of `trace`.
    """

    def __init__(self, folder: Path, steps: int | None) -> None:
        global _on, _watches_aborts
        if _on is not None:
            raise RuntimeError("a trace is on already: one at a time")
        from mpi4py import MPI

        self._folder = folder.absolute()
        self._steps = steps
        self._topology = world.get_topology()
        self._process = os.getpid()
        self._counted: Counter[int] = Counter()  # by module, as the flight recorder counts them
        self._unix_time = time.time() - time.monotonic()
        self._communicator = world.communicator().Dup()
        self._communicator.Set_name("mpiddp trace")
        self._communicator.Set_errhandler(MPI.ERRORS_RETURN)
        with world.recorded("the beginning of a trace"):
            self._meeting = Meeting(self._communicator, self._topology)
            self._meeting.come()
            began = self._meeting.measure()
            self._clock = Clock(self._meeting.origin(), began, None)
        _on = self
        world.add_companion(self)
        if not _watches_aborts:
            _watches_aborts = True
            call_before_abort(_leave_before_abort)
            replace_function(dist.destroy_process_group, _ending_before)
        self._collector = Collector(self._count)

    def __str__(self) -> str:
        """Return nothing: a program that ends need not be told of it."""
        return ""

    def look(self) -> None:
        """Do nothing: there is no message to look for. Not collective."""

    def requested(self) -> bool:
        """Return False: a trace announces no end. Not collective."""
        return False

    def _count(self, reducer: Any) -> None:
        """Count a reduction of all ranks, and end after the last. Collective."""
        if getattr(reducer, "joins", False):
            self._steps = None
        if reducer.process_group.size() == self._topology.world_size:
            self._counted[reducer.record_source] += 1
        if self._steps is not None and self._most_steps() >= self._steps:
            self.close()

    def _most_steps(self) -> int:
        return max(self._counted.values(), default=0)

    def close(self) -> None:
        """End it with all ranks, if it has not ended. Collective."""
        if _on is self:
            world.remove_companion(self)
            self.end()

    def end(self) -> None:
        """Compare the clocks again, write this rank's file and, on rank 0, that of all.

        Collective. Says on stderr what could not be written. Where other ranks do not come, and in
        the handling of an exception, it does what `leave` does.
        """
        if sys.exc_info()[0] is not None:
            self.leave()
            return
        if not self._stop():
            return
        self._meeting.deadline = time.monotonic() + _PATIENCE
        try:
            self._meeting.come()
            ended = self._meeting.measure()
            self._clock = Clock(self._clock.origin, self._clock.began, ended)
            problem = self._write()
            self._meeting.deadline = time.monotonic() + _PATIENCE
            problems = self._meeting.gather(problem)
        except Exception as error:
            if not isinstance(error, TimeoutError) and not losses.is_loss(error):
                raise
            self._say_alone(self._write())
            return
        if problems:
            self._merge(problems)
        communicators.free(self._communicator)

    def leave(self) -> None:
        """Write this rank's file only. Not collective."""
        if self._stop():
            self._say_alone(self._write())

    def _say_alone(self, problem: str) -> None:
        path = merging.path_of(self._folder, self._topology.rank)
        self._say(
            problem
            or f"the trace of this rank is in {path}. Other ranks were not waited for; "
            f"`python -m mpiddp.tracing {self._folder}` merges the files"
        )

    def _stop(self) -> bool:
        """Collect no more; return whether this is the first time, in the process that began."""
        global _on
        if _on is not self or self._process != os.getpid():
            return False
        _on = None
        self._collector.stop()
        return True

    def _write(self) -> str:
        """Write this rank's file; return why it could not be, "" if it was."""
        try:
            rank_file.write(
                self._folder, self._topology, self._clock, self._collector, self._unix_time
            )
        except Exception as error:  # a trace ends no job
            return f"the trace of this rank could not be written: {error}"
        return ""

    def _merge(self, problems: list[str]) -> None:
        for rank, problem in enumerate(problems):
            if problem:
                self._say(problem, rank)
        written = [rank for rank, problem in enumerate(problems) if not problem]
        seen = [rank for rank in written if merging.path_of(self._folder, rank).exists()]
        if len(seen) < len(written):
            self._say(
                f"sees the traces of {len(seen)} of {len(written)} ranks in {self._folder}: where "
                f"the hosts do not share that folder, copy the files of `ranks` together, and call "
                f"`python -m mpiddp.tracing`"
            )
        try:
            merged = merging.merge(self._folder, seen)
        except OSError as error:
            self._say(f"the traces could not be merged: {error}")
            return
        count = self._most_steps()
        steps = f"{count} step{'s' * (count != 1)}"
        print(f"mpiddp: a trace of {steps} is in {merged}", file=sys.stderr, flush=True)

    def _say(self, words: str, rank: int | None = None) -> None:
        if words:
            who = self._topology.rank if rank is None else rank
            print(f"mpiddp: rank {who}: {words}", file=sys.stderr, flush=True)


class trace:  # used like a function
    """Trace what each rank does, within a `with` block. Collective.

    ::

        with mpiddp.trace("folder", steps=20):
            for batch in batches:
                ...  # train

    It begins on entry, and ends after so many backward passes of a module that were reduced over
    all ranks, or at the end of the block. Then `folder/ranks/rank-N.json.gz` is each rank's file,
    and `folder/trace.json.gz` that of all, which Perfetto and chrome://tracing open. A block that
    an exception leaves writes the file of that rank only. docs/how-to/trace.md says what is in
    them.

    Args:
        folder: where to write to, made where it is missing; the files of before are overwritten.
        steps: how many, of the module that comes to it first; None: until the end of the block.

    Raises:
        RuntimeError: there is no process group of mpiddp, or a trace is on.
        ValueError: `steps` is less than 1.
    """

    def __init__(self, folder: str | os.PathLike[str], steps: int | None = None) -> None:
        if steps is not None and steps < 1:
            raise ValueError(f"steps must be at least 1, not {steps}")
        self._folder, self._steps = Path(folder), steps
        self._trace: Trace | None = None

    def __enter__(self) -> trace:
        self._trace = Trace(self._folder, self._steps)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        running, self._trace = self._trace, None
        if running is None or _on is not running:
            return
        if kind is None:
            running.close()
        else:
            world.remove_companion(running)
            running.leave()


def follow_world() -> None:
    """Trace the first steps of the world that begins next, as the settings say. Not collective."""
    folder = settings.TRACE.read_before_init()
    if folder is None or _begin in companion.at_start:
        return
    # The program may go elsewhere.
    _wanted.append(folder.absolute())
    companion.at_start.append(_begin)


# Where to write to, until it has begun.
_wanted: list[Path] = []


def _begin() -> None:
    """Begin, unless some rank has done so in a world of before. Collective."""
    from mpi4py import MPI

    wanted = world.communicator().allreduce(len(_wanted), op=MPI.MIN)
    if wanted:
        Trace(_wanted.pop(), settings.TRACE_STEPS.read())


def _ending_before(destroy: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function, which ends a trace first where it ends all groups."""

    @functools.wraps(destroy)
    def destroying(group: Any = None) -> Any:
        if _on is not None and (group is None or group is dist.group.WORLD):
            _on.close()
        return destroy(group)

    return destroying


def _leave_before_abort() -> None:
    if _on is not None:
        _on.leave()

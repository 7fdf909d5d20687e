"""Make a new world when ranks are lost, or when more are wanted.

Note [Agreement after a loss]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Some ranks hear of a loss when others have come to the end of what they did, of the function or of
the making of a world. All must shrink the same communicator, or none. So each of the two ends with
MPI_Comm_agree, which all ranks that live call, and whose result is the same on all.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch.distributed as dist

from mpiddp.mpi import communicators, losses
from mpiddp.mpi.abort import abort_job
from mpiddp.rendezvous import joining, world

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Watch", "end_waits", "is_of_a_loss", "let_go", "renew"]

Bring = Callable[["MPI.Intracomm", int], "MPI.Intracomm | None"]

# Seconds in which the news of a loss may come later than an error that it has caused.
_NEWS_LATER = 1.0

# Seconds after which the making of a world is given up and begun again; and after which the job
# ends. Processes that come import torch meanwhile.
_LIMIT = 30.0
_LAST_LIMIT = 150.0


class Watch:
    """Notices that a rank was lost while this one waits where MPI does not tell."""

    def __init__(self) -> None:
        global _watch
        if _watch is not None:
            _watch.stop()  # of another call of elastic functions
        self._communicator = world.communicator()
        self._lock = threading.Lock()
        self._stopped = False
        world.add_companion(self)
        world.on_loss(self.fail)
        _watch = self

    def __str__(self) -> str:
        return ""  # it leaves nothing open

    def look(self) -> None:
        """Called twice a second."""
        if _has_lost(self._communicator):
            self.fail()

    def fail(self) -> None:
        """Let everything under way fail."""
        with self._lock:
            if not self._stopped:
                _fail_everything()

    def stop(self) -> None:
        """Do so no more: what is made from now on is the next world's."""
        with self._lock:
            self._stopped = True

    def requested(self) -> bool:
        """Nobody has announced the job's end to it."""
        return False

    def end(self) -> None:
        """Nothing is to be freed."""

    def leave(self) -> None:
        """Nothing is to be said."""


_watch: Watch | None = None


def is_of_a_loss(error: Exception) -> bool:
    """Return whether an error of any kind came of a loss. Not collective."""
    if losses.is_loss(error):
        return True
    # A library may have raised an error of its own in between.
    deadline = time.monotonic() + _NEWS_LATER
    while time.monotonic() < deadline:
        if _has_lost(world.communicator()):
            return True
        time.sleep(0.01)
    return False


def end_waits() -> None:
    """Let the waits of all ranks fail, where the MPI can do that. Not collective."""
    if losses.can_go_on():
        _fail_everything()


def let_go(error: BaseException | None) -> None:
    """Let frames of the function go, with the wrapper and loaders in them. Not collective."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    gc.collect()


def renew(
    wanted: int,
    lost: bool,
    leave: Callable[[], None],
    bring: Bring = joining.bring,
    then: str = "",
) -> tuple[int, int]:
    """Make a new world of the ranks that live, and of processes that come.

    Collective over the ranks that live.

    Args:
        wanted: how many ranks it is to have; others come where fewer live, if the launcher starts
            any. 0: those that live.
        lost: whether ranks were lost. They may also be lost meanwhile.
        leave: called before what belongs to the old world is freed; maybe several times.
        bring: lets others come: given the ranks that live and how many are to come, it returns a
            communicator of all, or None if none come.
        then: says from where the job goes on that is started again.

    Returns:
        how many ranks were lost, and how many have come.
    """
    timeout: timedelta = getattr(dist.group.WORLD, "timeout", world.DEFAULT_TIMEOUT)
    communicator = world.communicator()
    before = communicator.Get_size()
    made: list[MPI.Intracomm] = []
    if _watch is not None:
        _watch.stop()
    while True:
        fine = True
        with _limited(then):
            if lost:
                _fail_everything()
                losses.let_finalize_not_wait()
            everyone = cast("MPI.Intracomm", communicator.Shrink() if lost else communicator.Dup())
            communicators.note(everyone)
            made.append(everyone)
            come = max(wanted - everyone.Get_size(), 0)
            try:
                if come:
                    joined = _with_others(everyone, come, bring)
                    come = 0 if joined is None else come
                    everyone = everyone if joined is None else joined
                    made.append(everyone)
                leave()
                world.rebuild(everyone, timeout)
            except Exception as error:
                if not losses.is_loss(error):
                    raise
                fine = False
                _fail_everything()
            agreed = losses.agree(everyone, fine)
        if agreed:
            break
        communicator, lost = everyone, True
    number = before + come - everyone.Get_size()
    for each in made:
        if each:
            communicators.free(each)
    return number, come


def _with_others(ranks: MPI.Intracomm, count: int, bring: Bring) -> MPI.Intracomm | None:
    """Return a communicator of these ranks and of those that come, None if none do.

    Collective over `ranks`.
    """
    from mpi4py import MPI

    joined, loss = None, None
    try:
        joined = bring(ranks, count)
        if joined is not None:
            communicators.note(joined)
    except MPI.Exception as error:
        loss = error if losses.is_loss(error) else None
    if losses.agree(ranks, joined is not None):
        return joined
    if joined is not None:
        if losses.can_go_on():
            joined.Revoke()  # so those that came end
        communicators.free(joined)
    if loss is not None:
        raise loss
    return None


@contextlib.contextmanager
def _limited(then: str) -> Iterator[None]:
    """Within, let what takes too long fail; if that does not help, end the job.

    With Open MPI 5.0.11 messages may be lost after a loss, see `losses.avoid_shared_memory_of_mpi`,
    and MPIX_Comm_shrink has waited for ever (in 1 of 57 jobs on a machine with too few cores).
    """
    timers = [threading.Timer(_LAST_LIMIT, _end_job, (then,))]
    if losses.can_go_on():
        timers.append(threading.Timer(_LIMIT, _fail_everything))
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _end_job(then: str) -> None:
    text = f"mpiddp: a new world was not made within {_LAST_LIMIT:g} s: this rank gives up. {then}"
    abort_job(1, lambda: print(text, file=sys.stderr, flush=True))


def _fail_everything() -> None:
    from mpi4py import MPI

    world.fail_what_is_under_way(MPI.ERR_PROC_FAILED)


def _has_lost(communicator: MPI.Intracomm) -> bool:
    if not communicator:
        return False
    failed = communicator.Get_failed()
    lost = failed.Get_size() > 0
    failed.Free()
    return lost or communicator.Is_revoked()

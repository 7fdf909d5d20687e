"""Take the signals that announce a job's end, and tell all ranks at one step."""

from __future__ import annotations

import os
import signal
import threading
from array import array
from collections.abc import Iterable
from types import FrameType
from typing import Any

from mpiddp import settings
from mpiddp.rendezvous import world

__all__ = ["install", "requested", "uninstall"]


class _Notice:
    """What `install` makes; it lives as long as the world."""

    def __init__(self, signals: Iterable[int]) -> None:
        global _heard_before_a_loss
        from mpiddp.preemption.agreement import Agreement  # which initialises MPI

        self._communicator = world.communicator()
        # Now: others may wait before this rank comes, and at their end there is no world any more.
        held = world.named_wait("preemption.requested() after a signal")
        freed = world.named_wait("preemption.uninstall()")
        self._asked = world.named_wait("preemption.requested()")
        with world.recorded("preemption.install()"):
            self._agreement = Agreement(self._communicator, held, freed)
        self._threaded = settings.PROGRESS_THREAD.read() is not False
        self._wanted = False
        self.announced = False  # whether `requested` has said so, on all ranks
        world.add_companion(self)
        self._before: dict[int, Any] = {}
        self._process_id = os.getpid()
        _let_children_end()
        for number in signals:
            self._before[number] = signal.signal(number, self._handle)
        # A script may hold them back till now: those that have come are handled here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)
        if _heard_before_a_loss:
            _heard_before_a_loss = False
            self._want()

    def __str__(self) -> str:
        return "mpiddp.preemption is installed"

    def requested(self) -> bool:
        answer = self._agreement.check() if self._threaded else self._ask_all()
        self.announced |= answer
        return answer

    def look(self) -> None:
        self._agreement.look()

    def end(self) -> None:
        self._forget()
        self._agreement.free()

    def leave(self) -> None:
        global _heard_before_a_loss
        _heard_before_a_loss = self._wanted or self._agreement.is_wanted
        self._forget()
        self._agreement.leave()

    def _ask_all(self) -> bool:
        """Return whether any rank wants to stop. Collective."""
        from mpi4py import MPI

        own, any_wants = array("i", [self._wanted]), array("i", [0])
        buffers = [own, MPI.INT], [any_wants, MPI.INT]
        self._asked.enter()
        with self._asked.recorded():
            request = self._communicator.Iallreduce(*buffers, MPI.MAX)
            world.wait_for(request, "MPI_Iallreduce", buffers)
        agreed = bool(any_wants[0])
        if agreed:  # else a signal may have come meanwhile, for the next time
            self._wanted = True
        return agreed

    def _want(self) -> None:
        self._wanted = True
        if self._threaded:
            self._agreement.want()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        is_child = os.getpid() != self._process_id  # whose handler calls this one
        if not is_child:
            self._want()
        if callable(before):
            before(number, frame)
        elif is_child and before is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    @property
    def signals(self) -> set[int]:
        """Those that are taken. Not collective."""
        return set(self._before)

    def forget_in_child(self) -> None:
        """Let the signals do in a forked process what they did before. Not collective."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                # A handler may be for its process alone, as the runner's is.
                again = getattr(before, "in_children", before)
                # None: it was set outside of Python, and cannot be set again from here.
                signal.signal(number, signal.SIG_DFL if again is None else again)

    def _forget(self) -> None:
        global _notice
        _notice = None
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets no other thread change a handler
        for number, before in self._before.items():
            # A handler that came after ours stays; one that was not set in Python is not known.
            if before is not None and signal.getsignal(number) == self._handle:
                signal.signal(number, before)


class _Announced:
    """Stays when `uninstall` comes after the announcement: `world.is_to_end` asks it."""

    def __init__(self) -> None:
        world.add_companion(self)

    def __str__(self) -> str:
        return ""  # it leaves nothing open

    def requested(self) -> bool:
        return True

    def look(self) -> None:
        """Nothing comes any more."""

    def end(self) -> None:
        self.leave()

    def leave(self) -> None:
        global _announced
        _announced = None


_lets_children_end = False


def _let_children_end() -> None:
    """From now on forked processes, such as those of a Pool, have the handlers from before.

    Till a child has them the signals are blocked: one that came would be taken, and lost.
    """
    global _lets_children_end
    if _lets_children_end:
        return
    _lets_children_end = True
    mask = threading.local()

    def block() -> None:
        mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _notice.signals if _notice else ())

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask.before)

    def forget() -> None:
        if _notice is not None:
            _notice.forget_in_child()
        restore()

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=forget)


_notice: _Notice | None = None
_announced: _Announced | None = None
# Whether the signals had come when a rank was lost. They do not come again in the next world.
_heard_before_a_loss = False


def install(signals: Iterable[int] | None = None) -> None:
    """From now on take the signals that announce the end of the job.

    Collective over the world. They no longer end the process: `requested` tells of them. A handler
    that Python had for one of them is still called. Signals that this thread has blocked
    (`signal.pthread_sigmask`) are let in, and those that have come meanwhile count.

    Args:
        signals: which ones; the default is ``MPIDDP_PREEMPTION_SIGNALS``: USR1, USR2 and TERM.
            On how many ranks they arrive does not matter.

    Raises:
        RuntimeError: there is no world of mpiddp; it was called before; or this is not the main
            thread, the only one that may take signals in Python.
    """
    global _announced, _notice
    if _notice is not None:
        raise RuntimeError("mpiddp.preemption.install() has been called before")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("call mpiddp.preemption.install() in the main thread")
    _notice = _Notice(settings.PREEMPTION_SIGNALS.read() if signals is None else signals)
    if _announced is not None:  # that was said of what came before
        world.remove_companion(_announced)
        _announced = None


def uninstall() -> None:
    """Let the signals do again what they did before `install`.

    Collective over the world. `destroy_process_group` does it too. Harmless without `install`.
    That the end was announced stays known to `mpiddp.elastic`, until `install` is called again.
    """
    global _announced
    notice = _notice
    if notice is not None:
        world.remove_companion(notice)
        if notice.announced and _announced is None:
            _announced = _Announced()
        notice.end()


def requested() -> bool:
    """Return whether to save and end now: the same answer on all ranks.

    Not collective, but every rank calls it equally often, such as once after each step. As long as
    no signal has come it sends nothing. After one, the ranks agree on the step, which takes about a
    second; from that step on it returns True. With ``MPIDDP_PROGRESS_THREAD=0`` it is collective:
    each call is an all-reduce of one number.

    Raises:
        RuntimeError: `install` has not been called.
    """
    if _notice is None:
        raise RuntimeError("call mpiddp.preemption.install() after init_process_group()")
    return _notice.requested()

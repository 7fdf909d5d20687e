"""How a rank under `python -m mpiddp` ends, and the whole job with it when it fails.

| the program | the job |
| --- | --- |
| ends | ends when all ranks have |
| raises | prints this rank's traceback, is aborted at once with 1 |
| is interrupted (KeyboardInterrupt) | the same with 130 |
| gets SIGTERM | is aborted at once with 143 |
| calls sys.exit(n), n not 0 | is aborted with n after this rank's atexit functions, with a line |
| calls os._exit(0) | ends when all ranks have; no atexit functions are called |

A rank that calls sys.exit(0) while others wait for it looks like one that is late: they raise after
the timeout of init_process_group.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from mpiddp.mpi import at_end, uncaught
from mpiddp.mpi.abort import abort_job, call_before_abort, time_limit
from mpiddp.rendezvous import absent
from mpiddp.runner import launchers_inside, output, trained_alone
from mpiddp.runner.advice import advice_on
from mpiddp.runner.program import without_own_frames

__all__ = ["JobExit"]

_TERMINATED = 128 + signal.SIGTERM


class JobExit:
    """Ends this process, and the job if it must end too.

    Not collective. Construct it before the program runs: the atexit functions of the program are
    then called before this one's.

    Args:
        rank: this process's rank in the world.
        world_size: the number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._status = 0
        self._process_id = os.getpid()
        self._terminating = threading.Lock()
        call_before_abort(output.release)
        atexit.register(self._at_exit)

    def exit(self, code: object) -> int:
        """Return the exit status of ``sys.exit(code)``; print `code` if it is not a status."""
        if code is None or isinstance(code, int):
            self._status = (code or 0) & 0xFF  # what the system keeps of it
            return self._status
        self._status = 1
        limit = time_limit(1) if self._world_size > 1 else contextlib.nullcontext()
        # A broken stderr must not keep the job from ending.
        with limit, contextlib.suppress(Exception), output.shown_on_terminal():
            print(code, file=sys.stderr)
        return self._status

    def fail(self, error: BaseException) -> int:
        """Print the traceback of an uncaught exception and abort the job.

        Returns:
            The exit status, in a world of one, where nobody waits for this process.
        """
        error.__traceback__ = without_own_frames(error.__traceback__)
        self._status = uncaught.status_of(error)
        if self._world_size > 1 and os.getpid() == self._process_id:
            abort_job(
                self._status,
                lambda: self._show(error),
                # What each rank writes to a file of its own is whole.
                None if output.goes_to_files() else lambda first: self._show(error, first),
            )
        else:
            with output.shown_on_terminal():
                sys.excepthook(type(error), error, error.__traceback__)
                self._advise(error)
        return self._status

    def _show(self, error: BaseException, first: int | None = None) -> None:
        with output.shown_on_terminal():
            if first is None:
                uncaught.show(error, self._rank)
                self._advise(error)
            else:
                uncaught.show_in_short(error, self._rank, first)

    def _advise(self, error: BaseException) -> None:
        # Words that cannot be said must not keep the job from ending.
        with contextlib.suppress(Exception):
            if advice := advice_on(error):
                print(advice, file=sys.stderr, flush=True)

    def watch_sigterm(self) -> None:
        """Let SIGTERM abort the job, with the same status on every MPI.

        From another thread, since the main one may be waiting inside of MPI, where no handler
        written in Python is called. A handler that the program installs takes precedence.
        """
        if self._world_size == 1 or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.signal(signal.SIGTERM, self._terminate)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

        self._leave_children_alone()

        def watch() -> None:
            while received := os.read(reading, 1):
                ours = signal.getsignal(signal.SIGTERM) == self._terminate
                if received[0] == signal.SIGTERM and ours:
                    self._terminate()

        threading.Thread(target=watch, name="mpiddp SIGTERM", daemon=True).start()

    def _leave_children_alone(self) -> None:
        """Let forked processes, such as a DataLoader's, die of SIGTERM as without our handler.

        Until a child has dropped the handler, it would write to this process's pipe, so SIGTERM is
        blocked until then.
        """
        mask = threading.local()

        def block() -> None:
            mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

        def restore() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask.before)

        def forget() -> None:
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) == self._terminate:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            restore()

        os.register_at_fork(before=block, after_in_parent=restore, after_in_child=forget)

    def _terminate(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Abort the job: as the handler, or in the thread, whichever comes first."""
        if self._terminating.acquire(blocking=False):
            abort_job(_TERMINATED)
            os._exit(_TERMINATED)  # MPI was finalised already

    # For who replaces the handler, as mpiddp.preemption does, and gives children the one before.
    _terminate.in_children = signal.SIG_DFL  # type: ignore[attr-defined]

    def finish_at_direct_exit(self) -> None:
        """Let `os._exit(0)` of the program leave MPI first. Not collective.

        It is the last line of scripts whose threads would not end. To a launcher a rank that leaves
        MPI unfinished has failed. Children, and other threads, exit as ever.
        """
        plain = os._exit

        def _exit(status: int) -> NoReturn:
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            if (
                status == 0
                and os.getpid() == self._process_id
                and threading.current_thread() is threading.main_thread()
                and caller.partition(".")[0] != "mpiddp"
            ):
                with contextlib.suppress(Exception):
                    at_end.run()
                    self._at_exit()
                    _finalize()
            plain(status)

        os._exit = _exit

    def _at_exit(self) -> None:
        if os.getpid() != self._process_id:
            return
        if self._status and self._world_size > 1:
            abort_job(self._status, lambda: uncaught.say_status(self._rank, self._status))
        if not self._status:
            trained_alone.say(self._rank, self._world_size)
            launchers_inside.say(self._rank, self._world_size)
        absent.end()
        output.release()


def _finalize() -> None:
    from mpi4py import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()

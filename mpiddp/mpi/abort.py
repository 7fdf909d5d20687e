"""End the whole job from one rank, without losing its last output.

Note [Nothing stands before the abort]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All other ranks wait for a rank that ends alone. Printing its last output may raise (a full disk, a
closed stream) or block (a pipe that nobody reads), and so may functions of the user that print it.
So MPI_Abort is called after all of that, whatever it raises. If printing blocks, a thread calls
MPI_Abort after a time. That may block too, since MPICH prints a line of its own, so streams that
take nothing now are redirected to /dev/null. And if all this does not end the process, a thread of
faulthandler does, which does not need the GIL: launchers end a job if a rank ends like that.

One thing comes before it all: at the end of a script Python flushes stdout before it calls any hook
for an exception. That blocks for ever if data is held back for a pipe that nobody reads. Under
`python -m mpiddp` it cannot happen.
"""

from __future__ import annotations

import array
import contextlib
import faulthandler
import fcntl
import functools
import os
import select
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator

from mpiddp.mpi import first_words

__all__ = [
    "abort_job",
    "call_at_once",
    "call_before_abort",
    "do_not_call",
    "is_ending",
    "time_limit",
]

# Called before anything else: they tell other ranks that this one ends the job, if it is the first.
_at_once: list[Callable[[], None]] = []

# Called to send out what this process has printed.
_release: list[Callable[[], None]] = []
# Whether this process ends the job.
_ending = False

# Seconds to wait for a launcher that does not read.
_PATIENCE = 2.0
# Seconds after which MPI_Abort is called although what comes before it has not ended: enough for a
# hook that formats the traceback with libraries from a slow file system.
_LIMIT = 8.0
# Seconds after which the process ends although MPI_Abort does not end it: from the beginning, and
# from the call of MPI_Abort. MPICH's waits for a lock that another call may hold for ever.
_LAST_LIMIT, _LIMIT_OF_ABORT = 12.0, 6.0
# Seconds that the rank that has failed first has to print its last output and abort.
_FOR_THE_FIRST = 2.0

_STREAMS = (1, 2)


def call_before_abort(release: Callable[[], None]) -> None:
    """Let `abort_job` call `release`, which sends out the output that it holds. Not collective."""
    _release.append(release)


def call_at_once(function: Callable[[], None]) -> None:
    """Let `abort_job` call `function`, which neither blocks nor raises, first. Not collective."""
    _at_once.append(function)


def do_not_call(function: Callable[[], None]) -> None:
    """Take back `call_at_once`, if it was called. Not collective."""
    with contextlib.suppress(ValueError):
        _at_once.remove(function)


def is_ending() -> bool:
    """Return whether this process has begun to end the job. Not collective."""
    return _ending


def abort_job(
    code: int,
    last_words: Callable[[], object] | None = None,
    after_another: Callable[[int], object] | None = None,
) -> None:
    """Call MPI_Abort on the world once this process's output has left it.

    A launcher ends the ranks as soon as it hears of the abort, and may then stop reading their
    pipes: without the wait MPICH's lost 3 of 40 tracebacks. Whatever is wrong with the output,
    MPI_Abort is called in time, see Note [Nothing stands before the abort]. Returns only where MPI
    has been finalised, or was never initialised. Not collective.

    Args:
        code: exit status of the job, where the launcher passes it on.
        last_words: prints why the job ends; what it raises is ignored.
        after_another: prints the same in short, where another rank has failed before, see Note [One
            traceback]; it is given that rank, or UNKNOWN.
    """
    global _ending
    _ending = True
    first = first_words.claim()
    for function in list(_at_once):
        function()
    is_short = first is not None and after_another is not None
    if first is not None and after_another is not None:
        last_words = functools.partial(after_another, first)
    with time_limit(code) as nowhere:
        try:
            for step in (last_words, *_release, _send_out):
                if step is not None:
                    # Not Exception: a hook may call sys.exit, and Ctrl-C may come a second time.
                    with contextlib.suppress(BaseException):
                        step()
            if is_short:
                time.sleep(_FOR_THE_FIRST)  # it ends this process, once it has said all
        finally:
            if nowhere >= 0:
                faulthandler.dump_traceback_later(_LIMIT_OF_ABORT, exit=True, file=nowhere)
            _call_mpi_abort(code)


@contextlib.contextmanager
def time_limit(code: int) -> Iterator[int]:
    """Within, abort the job with `code` if printing takes too long. Not collective.

    It gives a descriptor of /dev/null for faulthandler, which ends the process; -1: there is none.
    """
    timer = threading.Timer(_LIMIT, _call_mpi_abort, (code,))
    timer.daemon = True
    nowhere = -1
    with contextlib.suppress(OSError, RuntimeError):  # no descriptor or no thread is available
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        faulthandler.dump_traceback_later(_LAST_LIMIT, exit=True, file=nowhere)
    # From Python 3.12 on the interpreter starts no thread while it ends.
    with contextlib.suppress(RuntimeError):
        timer.start()
    yield nowhere
    timer.cancel()
    if nowhere >= 0:
        faulthandler.cancel_dump_traceback_later()
        os.close(nowhere)


def _send_out() -> None:
    """Flush Python's streams, and wait until the launcher has read them."""
    deadline = time.monotonic() + _PATIENCE
    for stream, descriptor in zip((sys.stdout, sys.stderr), _STREAMS, strict=True):
        if stream is not None:
            with contextlib.suppress(Exception):  # closed, on a full disk, or not Python's own
                stream.flush()
        while _unread_bytes(descriptor) > 0 and time.monotonic() < deadline:
            time.sleep(0.001)


def _call_mpi_abort(code: int) -> None:
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    with contextlib.suppress(OSError):
        _close_blocked_streams()
    try:
        MPI.COMM_WORLD.Abort(code)
    finally:
        # MPICH's may return before the launcher ends this process, which must do nothing more.
        os._exit(code)


def _close_blocked_streams() -> None:
    """Redirect to /dev/null what MPI would print to a full pipe."""
    for descriptor in _STREAMS:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if not poll.poll(0):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def _unread_bytes(descriptor: int) -> int:
    """Return how many bytes are still in a pipe or a terminal; 0 for anything else."""
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            request = termios.FIONREAD
        elif os.isatty(descriptor):
            request = termios.TIOCOUTQ
        else:
            return 0
        count = array.array("i", [0])
        fcntl.ioctl(descriptor, request, count)
    except OSError:
        return 0  # closed, or a device that cannot tell
    return count[0]

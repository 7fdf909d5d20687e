"""An exception that nobody catches ends the whole job: the other ranks would wait for this one.

Note [Who hears of an exception]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The main thread's exceptions reach `sys.excepthook`. Our hook lets the one before it print, and
aborts the job. A hook that replaces ours later (as rich's does) prints but does not abort. The
interpreter then ends, and keeps the exception in `sys.last_value`: we look there before it waits
for threads. Others keep exceptions there too (pytest does), but these were caught: their tracebacks
do not begin at the bottom of the stack.

Exceptions of other threads reach `threading.excepthook`. Most of these threads concern no other
rank: a progress bar's, a logger's. Other ranks wait only for threads that take part in the job,
because they have called a collective or a wrapped module's forward: their exceptions end the job.

`sys.exit(n)` reaches no hook, and the interpreter forgets it before any function of atexit is
called. So the functions that raise it are replaced by ones that note it and the frames below. It is
what ends the interpreter if none of these frames has returned: otherwise one of them has caught it.
The job ends with n once the program's own functions of atexit have been called.
"""

from __future__ import annotations

import builtins

# Its own function for the end of the interpreter joins its threads. Ours must be called before
# that, and so be registered later.
import concurrent.futures.thread  # noqa: F401
import contextlib
import dis
import functools
import os
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from mpiddp.mpi import first_words
from mpiddp.mpi.abort import abort_job

__all__ = [
    "check_end",
    "end_job",
    "end_traceback_in_program",
    "paused",
    "say_status",
    "show",
    "show_in_short",
    "status_of",
    "take_part",
    "unwatch",
    "watch",
    "watch_if_initialised",
]


@dataclass(frozen=True)
class _Watched:
    rank: int
    process_id: int


_watched: _Watched | None = None
_end_is_watched = False

# Characters of a message in a line: `srun` hands lines on whole up to 1,024.
_SHOWN = 600

# That of mpiddp, which may be in a clone.
_OWN_FOLDER = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,)

# In the paths of what is not the user's own.
_LIBRARIES = (*(f"{os.sep}{name}-packages{os.sep}" for name in ("site", "dist")), *_OWN_FOLDER)

# The attribute of an exception whose traceback is not shown within mpiddp.
_HIDES = "_mpiddp_hides_own_frames"

# Per thread: whether it takes part.
_own = threading.local()
# The status that the main thread has given last to end the interpreter, and the frames below.
_exiting: tuple[int, list[FrameType]] = 0, []


def watch(rank: int, world_size: int) -> None:
    """Let uncaught exceptions end the job from now on, unless it has one rank. Not collective.

    Args:
        rank: this process's, for messages.
        world_size: the number of ranks.
    """
    global _watched, _end_is_watched
    _watched = _Watched(rank, os.getpid()) if world_size > 1 else None
    take_part()
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook, sys.excepthook)
    _wrap_thread_hook()
    if not _end_is_watched:
        _end_is_watched = True
        _keep_exits()
        # Called before non-daemon threads are joined, which may wait for other ranks.
        before_joining = getattr(threading, "_register_atexit", None)
        if before_joining is not None:
            before_joining(check_end)


def watch_if_initialised() -> None:
    """Do what `watch` does if MPI has been initialised and nothing is watched. Not collective."""
    module = sys.modules.get("mpi4py.MPI")
    if _watched is None and module is not None and module.Is_initialized():
        world = module.COMM_WORLD
        if not module.Is_finalized() and world.Get_size() > 1:
            watch(world.Get_rank(), world.Get_size())


def unwatch() -> None:
    """Put back the hooks, unless somebody has replaced ours. Not collective."""
    global _watched
    _watched = None
    if isinstance(sys.excepthook, _Hook):
        sys.excepthook = sys.excepthook.original
    if isinstance(threading.excepthook, _ThreadHook):
        threading.excepthook = threading.excepthook.before


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within, `sys.excepthook` is not ours, so that torch can wrap the user's. Not collective.

    torch's hook gathers what the wrapped one prints, which an abort in there would lose.
    """
    if isinstance(sys.excepthook, _Hook):
        sys.excepthook = sys.excepthook.before
    original = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = _Hook(sys.excepthook, original)


def end_traceback_in_program(error: BaseException) -> None:
    """Let what is shown of an error, where nobody catches it, end at the call of mpiddp.

    Not collective. For errors of how the program begins: where mpiddp finds that says nothing.
    """
    setattr(error, _HIDES, True)


def take_part() -> None:
    """Note that other ranks wait for what this thread does. Not collective."""
    if not hasattr(_own, "takes_part"):
        _own.takes_part = True
        if _watched is not None:
            _wrap_thread_hook()  # if somebody has replaced it


def status_of(error: BaseException) -> int:
    """Return the exit status of a process that `error` ends. Not collective."""
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def show(error: BaseException, rank: int) -> None:
    """Print a traceback as the user's hook does, else with the rank before each line.

    Not collective.
    """
    hook = sys.excepthook
    if isinstance(hook, _Hook):
        hook = hook.before
    if hook is not sys.__excepthook__:
        try:
            hook(type(error), error, error.__traceback__)
            # The interpreter's own hook ignores that it could not print.
            if sys.stderr is not None:
                sys.stderr.flush()
                return
        except Exception:  # noqa: S110  # torch's hook, too, raises where it cannot print
            pass
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    # As torch.distributed shows it once it is initialised.
    _say(*(f"[rank{rank}]: {line}" for line in text.rstrip("\n").split("\n")))


def show_in_short(error: BaseException, rank: int, first: int) -> None:
    """Print in a line what a rank has raised after another one, see Note [One traceback].

    Not collective. A hook of the user's gets the traceback.

    Args:
        error: what it has raised.
        rank: this one.
        first: the other one, or UNKNOWN.
    """
    hook = sys.excepthook
    if hook is not sys.__excepthook__ and getattr(hook, "original", None) is not sys.__excepthook__:
        show(error, rank)
        return
    who = "another rank" if first == first_words.UNKNOWN else f"rank {first}"
    said = "".join(traceback.format_exception_only(type(error), error))
    said = textwrap.shorten(said, _SHOWN, placeholder=" …")
    _say(f"[rank{rank}]: {who} has failed before, see there. Here{_place(error)}: {said}")


def _place(error: BaseException) -> str:
    """Return in words where in the user's program an exception came from, "" if nowhere."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        of_a_library = any(part in frame.filename for part in _LIBRARIES)
        # Not where there is no such file: a compiled module's, or <frozen>.
        if not of_a_library and os.path.exists(frame.filename):
            return f", at {frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def end_job(error: BaseException) -> None:
    """Print the traceback of an exception that has not left the program yet; abort the job.

    Not collective. Does nothing in a world of one.
    """
    watched = _active()
    if watched is None:
        return
    error.__traceback__ = _with_callers(error.__traceback__)
    abort_job(
        status_of(error),
        lambda: show(error, watched.rank),
        lambda first: show_in_short(error, watched.rank, first),
    )


def check_end(at_last: bool = False) -> None:
    """Abort the job if an uncaught exception is what ends this interpreter. Not collective.

    Args:
        at_last: whether the program's own functions of atexit have been called; then also if it
            ends with a status that is not 0.
    """
    if at_last:
        _check_status()
    error: BaseException | None = getattr(sys, "last_value", None)
    start: TracebackType | None = getattr(sys, "last_traceback", None)
    if error is None or start is None or start.tb_frame.f_back is not None:
        return
    if _active() is not None:
        abort_job(status_of(error))


def _check_status() -> None:
    watched, (status, frames) = _active(), _exiting
    if watched is not None and status and not any(map(_has_returned, frames)):
        abort_job(status, lambda: say_status(watched.rank, status))


def _has_returned(frame: FrameType) -> bool:
    """Return whether a frame that has ended did so by `return`, not by an exception."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def say_status(rank: int, status: int) -> None:
    """Say that a rank's program ended with a status that is not 0. Not collective."""
    _say(
        f"mpiddp: rank {rank} exited with status {status} while other ranks are in the job, which "
        f"ends with it"
    )


def _keep_exits() -> None:
    """Let sys.exit, exit and quit keep what they raise. Not collective."""

    def keeping(function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def exit(*args: Any, **kwargs: Any) -> object:
            global _exiting
            try:
                return function(*args, **kwargs)
            except SystemExit as error:
                if threading.current_thread() is threading.main_thread():
                    code = error.code
                    status = code & 0xFF if isinstance(code, int) else int(code is not None)
                    _exiting = status, list(_frames_below(sys._getframe(1)))
                raise

        return exit

    sys.exit = keeping(sys.exit)  # type: ignore[assignment]
    for name in ("exit", "quit"):  # of the module site, which there may not be
        if hasattr(builtins, name):
            setattr(builtins, name, keeping(getattr(builtins, name)))


def _frames_below(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _active() -> _Watched | None:
    """Return what is watched, None in a forked child as well."""
    if _watched is None or _watched.process_id != os.getpid():
        return None
    return _watched


class _Hook:
    """Takes the place of `sys.excepthook`.

    Args:
        before: the hook that prints.
        original: the one to put back in the end.
    """

    def __init__(self, before: Callable[..., Any], original: Callable[..., Any]) -> None:
        self.before = before
        self.original = original

    def __call__(
        self, kind: type[BaseException], error: BaseException, start: TracebackType | None
    ) -> None:
        start = _shown_part(error, start)
        watched = _active()
        # Called by another hook, which may use what is printed: `check_end` aborts later.
        if watched is None or sys.excepthook is not self:
            self.before(kind, error, start)
            return
        error = error.with_traceback(start)
        abort_job(
            status_of(error),
            lambda: show(error, watched.rank),
            lambda first: show_in_short(error, watched.rank, first),
        )


def _shown_part(error: BaseException, start: TracebackType | None) -> TracebackType | None:
    """Return a traceback, without what `end_traceback_in_program` hides. Not collective."""
    entry = start
    while entry is not None and getattr(error, _HIDES, False):
        if entry.tb_next and entry.tb_next.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
            entry.tb_next = None
        entry = entry.tb_next
    return start


class _ThreadHook:
    """Takes the place of `threading.excepthook`.

    Args:
        before: the hook that prints.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        watched = _active()
        status, words = 1, ""
        if args.exc_type is SystemExit:
            code = getattr(args.exc_value, "code", None)
            status = code & 0xFF if isinstance(code, int) else int(code is not None)
            words = f"has called sys.exit({code!r})"
        elif args.exc_value is not None:
            status = status_of(args.exc_value)
            words = "has failed"
        if watched is None or status == 0 or not hasattr(_own, "takes_part"):
            self.before(args)
            return
        name = "" if args.thread is None else f" {args.thread.name!r}"

        def last_words() -> None:
            with contextlib.suppress(Exception):
                self.before(args)
            _say(f"[rank{watched.rank}]: thread{name} {words}. The job ends: other ranks wait for "
                 f"threads that have called collectives or a wrapped module")  # fmt: skip

        abort_job(status, last_words)


def _wrap_thread_hook() -> None:
    if not isinstance(threading.excepthook, _ThreadHook):
        threading.excepthook = _ThreadHook(threading.excepthook)


def _say(*lines: str) -> None:
    """Print lines to the first stream that takes them."""
    for stream in (sys.stderr, sys.__stderr__, sys.stdout):
        if stream is not None:
            with contextlib.suppress(Exception):
                print("\n".join(lines), file=stream, flush=True)
                return


def _with_callers(start: TracebackType | None) -> TracebackType | None:
    """Return the traceback of a caught exception, with the frames of its callers added."""
    frame: FrameType | None = None if start is None else start.tb_frame.f_back
    while frame is not None:
        start = TracebackType(start, frame, frame.f_lasti, frame.f_lineno)
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>":
            break  # under `python -m mpiddp` its own frames lie below
        frame = frame.f_back
    return start

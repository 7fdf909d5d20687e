"""Where a rank's output goes: with its rank before each line, or into files of its own.

The file descriptors are redirected, so what C code and child processes print goes the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from mpiddp.runner import output_relay

__all__ = [
    "goes_to_files",
    "release",
    "send_by_line",
    "send_tagged",
    "send_to_files",
    "shown_on_terminal",
]

# Seconds that the relay may take to pass on what it has.
_PATIENCE = 2.0

# stdio.h of Linux: a stream that is flushed at the end of each line.
_IOLBF = 1

_STREAMS = (1, 2)

# Where the two streams went before, while they are redirected.
_before: list[int] = []
# The relay that passes them on, and a socket to it.
_pump: tuple[subprocess.Popen[bytes], socket.socket] | None = None
_to_files = False


def goes_to_files() -> bool:
    """Return whether this rank's output is written to files of its own. Not collective."""
    return _to_files


def send_by_line() -> None:
    """Flush the output of Python and of C at the end of each line. Not collective.

    A rank may be killed at any time, because another one failed; its output must not be lost.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with contextlib.suppress(OSError, AttributeError, ValueError):
        library = ctypes.CDLL(None)
        library.setvbuf(ctypes.c_void_p.in_dll(library, "stdout"), None, _IOLBF, 0)


def send_to_files(out: Path, error: Path) -> None:
    """Write stdout and stderr to two new files instead. Not collective."""
    global _to_files
    _to_files = True
    _redirect(*(os.open(path, _FILE_FLAGS, 0o666) for path in (out, error)))


def send_tagged(tag: str, out: Path | None = None, error: Path | None = None) -> None:
    """Put `tag` before each line of stdout and stderr, and copy both to files. Not collective.

    Args:
        tag: such as "[3] "; empty leaves the lines as they are.
        out: new file that gets stdout without tags as well; None for no files.
        error: the same for stderr.
    """
    global _pump, _to_files
    files = [] if out is None or error is None else [out, error]
    _to_files = bool(files)
    for path in files:
        os.close(os.open(path, _FILE_FLAGS, 0o666))
    out_end, out_pipe = os.pipe()
    error_end, error_pipe = os.pipe()
    ours, theirs = socket.socketpair()
    program = [sys.executable, "-I", "-S", output_relay.__file__]
    arguments = [tag, str(error_end), str(theirs.fileno()), *(os.path.abspath(p) for p in files)]
    process = subprocess.Popen(
        [*program, *arguments], stdin=out_end, pass_fds=(error_end, theirs.fileno())
    )
    for descriptor in (out_end, error_end):
        os.close(descriptor)
    theirs.close()
    _pump = process, ours
    _redirect(out_pipe, error_pipe)


_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC


def _redirect(*targets: int) -> None:
    _flush()
    for stream, target in zip(_STREAMS, targets, strict=True):
        _before.append(os.dup(stream))
        os.dup2(target, stream)
        os.close(target)


def release() -> None:
    """Send stdout and stderr where they went before, after passing on all output so far.

    Not collective. Does nothing when they were not redirected.
    """
    global _pump
    _flush()
    for stream, target in zip(_STREAMS, _before, strict=False):
        os.dup2(target, stream)
        os.close(target)
    _before.clear()
    pump, _pump = _pump, None
    if pump is None:
        return
    process, control = pump
    control.settimeout(_PATIENCE)
    with contextlib.suppress(OSError), control:
        control.send(b".")
        control.recv(1)
    # The relay goes on while child processes of this one print.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.returncode = process.returncode or 0  # no warning that it still runs


@contextlib.contextmanager
def shown_on_terminal() -> Iterator[None]:
    """Within it, also print sys.stderr where it went before it was sent to a file."""
    stderr = sys.stderr
    if not _before or _pump is not None or stderr is None:
        yield
        return
    terminal = open(os.dup(_before[1]), "w", errors="backslashreplace")  # noqa: SIM115
    with contextlib.suppress(OSError), terminal:  # it may be full when it is closed
        sys.stderr = _Both(stderr, terminal)
        try:
            yield
        finally:
            sys.stderr = stderr


class _Both(io.TextIOBase):
    """A text stream that writes to others, and raises only if all of them fail."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = streams

    def write(self, text: str, /) -> int:
        self._each(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._each(lambda stream: stream.flush())

    def _each(self, call: Callable[[TextIO], object]) -> None:
        errors = []
        for stream in self._streams:
            try:
                call(stream)
            except (OSError, ValueError) as error:  # a full disk, a closed stream
                errors.append(error)
        if len(errors) == len(self._streams):
            raise errors[0]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # closed
                stream.flush()

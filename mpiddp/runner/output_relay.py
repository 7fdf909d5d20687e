"""A program beside a rank that passes its output on, line by line, and outlives it.

    python -I -S output_relay.py TAG ERROR_PIPE CONTROL [OUT_FILE ERROR_FILE]

It reads the rank's stdout from its own stdin and the rank's stderr from the descriptor ERROR_PIPE,
puts TAG before each line, and writes to its own stdout and stderr, and all of it untagged to the
files. It ends when nobody can write to the pipes any more: what a killed rank wrote is not lost.
When a byte comes through the socket CONTROL, it passes on what it has, and answers with a byte.

Run as a file, without the package around it: it must start in milliseconds.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import re
import selectors
import signal
import stat
import sys
import termios
import time

# What launchers read from a rank at a time: they may put another rank's output after it, so a
# write must hold whole lines and no more than this.
_AT_A_TIME = 4096
# Seconds to wait for a launcher that does not read, before writing all the same.
_PATIENCE = 1.0

# A progress bar's line ends with the carriage return that begins its next one.
_LINE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?=[^\n]))")


class Stream:
    """One of a rank's two streams.

    Args:
        source: descriptor to read from.
        target: descriptor of the terminal or the launcher.
        tag: what to put before each line there; empty passes everything on as it comes.
        file: name of a file for everything, untagged; empty for none.
    """

    def __init__(self, source: int, target: int, tag: bytes, file: str) -> None:
        self.source = source
        self._target: int | None = target
        self._tag = tag
        self._file = open(file, "ab", buffering=0) if file else None  # noqa: SIM115
        self._pending = b""
        os.set_blocking(source, False)

    def pump(self) -> bool:
        """Pass on what can be read now. Return False at the end of the stream."""
        while True:
            try:
                data = os.read(self.source, 65536)
            except BlockingIOError:
                return True
            if not data:
                self.flush()
                return False
            self._pass_on(data)

    def flush(self) -> None:
        """Pass on an unfinished line as if it were whole."""
        if self._pending:
            self._write(self._tag + self._pending.rstrip(b"\r") + b"\n")
            self._pending = b""

    def _pass_on(self, data: bytes) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk is full: the terminal still has it
                self._file.write(data)
        if not self._tag:
            self._write(data)
            return
        data = self._pending + data
        batch, end = b"", 0
        for match in _LINE.finditer(data):
            line, end = self._tag + match[0], match.end()
            if batch and len(batch) + len(line) > _AT_A_TIME:
                self._write(batch)
                batch = b""
            batch += line
        self._write(batch)
        self._pending = data[end:]

    def _write(self, data: bytes) -> None:
        if self._target is None or not data:
            return
        _wait_until_read(self._target)
        try:
            while data:
                data = data[os.write(self._target, data) :]
        except OSError:
            # The launcher is gone. The rank must not block, so its pipe is read all the same.
            self._target = None


def _wait_until_read(descriptor: int) -> None:
    """Wait until a pipe is empty, so that its reader gets the next write as a whole."""
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return
        count = array.array("i", [0])
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            fcntl.ioctl(descriptor, termios.FIONREAD, count)
            if count[0] == 0:
                return
            time.sleep(2e-4)
    except OSError:
        return


def main(arguments: list[str]) -> None:
    """Pass on until both streams have ended."""
    tag, error_pipe, control, out_file, error_file = (*arguments, "", "")[:5]
    # Not in the rank's process group, which a launcher kills.
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
        signal.signal(ignored, signal.SIG_IGN)
    open_streams = [
        Stream(0, 1, os.fsencode(tag), out_file),
        Stream(int(error_pipe), 2, os.fsencode(tag), error_file),
    ]
    with selectors.DefaultSelector() as selector:
        for stream in open_streams:
            selector.register(stream.source, selectors.EVENT_READ, stream)
        selector.register(int(control), selectors.EVENT_READ)
        while open_streams:
            for key, _ in selector.select():
                if key.data is None:
                    asked = os.read(int(control), 1)
                    for stream in open_streams:
                        stream.pump()
                        stream.flush()
                    if asked:
                        with contextlib.suppress(OSError):
                            os.write(int(control), b".")
                    else:
                        selector.unregister(int(control))
                elif not key.data.pump():
                    selector.unregister(key.data.source)
                    open_streams.remove(key.data)


if __name__ == "__main__":
    main(sys.argv[1:])

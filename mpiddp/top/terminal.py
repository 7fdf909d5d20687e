"""Redraw what the ranks do in a terminal until somebody presses q. Needs rich."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

try:
    import termios
    import tty
except ImportError:  # no terminals as Linux has them
    pass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segment, Segments
from rich.table import Table as RichTable
from rich.text import Text

from mpiddp.top.cells import summary, table
from mpiddp.top.jobs import Job
from mpiddp.top.text import NOBODY

__all__ = ["watch"]

# Seconds in which a change of the terminal's size, and Ctrl-Z, are seen.
_SLICE = 0.25
_KEY = re.compile(rb"\x1b\[[\d;]*[A-Za-z~]|[\x00-\xff]")  # some come as several bytes
_QUIT = {b"q", b"Q", b"\x03", b"\x04"}
_LINES = {b"\x1b[A": -1, b"k": -1, b"\x1b[B": 1, b"j": 1}
_PAGES = {b"\x1b[5~": -1, b"\x1b[6~": 1, b" ": 1}
_FIRST = {b"\x1b[H", b"\x1b[1~", b"g"}


def watch(host: str, look: Callable[[], Sequence[Job]], interval: float) -> int:
    """Redraw until q or Ctrl-C; return the exit status. Not collective.

    Ctrl-Z stops this program, with the terminal as before; it draws anew when it goes on.

    Args:
        host: its name.
        look: returns the jobs of now.
        interval: seconds between two looks.
    """
    view = _View(host, look, interval)
    with (
        contextlib.suppress(KeyboardInterrupt),
        # A shell lets what it starts in the background, and so all that this starts, ignore both.
        _handled(signal.SIGINT, signal.default_int_handler),
        _handled(signal.SIGQUIT, _end),
        _handled(signal.SIGTERM, _end),
        _handled(signal.SIGHUP, _end, ignored=False),
        _handled(signal.SIGTSTP, view.ask_to_stop, ignored=False),
    ):
        while True:
            with _keys() as read_keys, _screen(view.console) as live:
                view.redraw(live, read_keys)
            if not view.is_to_stop:
                break
            view.is_to_stop = False
            _stop()
    return 0


class _View:
    """What is seen: of a host, from some line on.

    Attributes:
        console: where.
        is_to_stop: whether Ctrl-Z was pressed.
    """

    def __init__(self, host: str, look: Callable[[], Sequence[Job]], interval: float) -> None:
        self.console = Console()
        self.is_to_stop = False
        self._host, self._look, self._interval = host, look, interval
        self._top = 0  # the first line that is shown

    def ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTSTP: not in the middle of a line."""
        self.is_to_stop = True

    def redraw(self, live: Live, read_keys: Callable[[float], bytes]) -> None:
        """Redraw until the user wants this program to end or stop."""
        while True:
            jobs, next_look, size = self._look(), time.monotonic() + self._interval, None
            keys: list[bytes] = []
            while time.monotonic() < next_look:
                if size != self.console.size or keys:
                    size = self.console.size
                    lines = _lines(self.console, self._host, jobs)
                    top = self._top = max(min(self._top, len(lines) - size.height), 0)
                    live.update(_part(lines[top : top + size.height]), refresh=True)
                left = max(next_look - time.monotonic(), 0)
                keys = _KEY.findall(read_keys(min(_SLICE, left)))
                if self.is_to_stop or not _QUIT.isdisjoint(keys):
                    return
                for key in keys:
                    self._top += _LINES.get(key, 0) + _PAGES.get(key, 0) * (size.height - 1)
                    self._top = 0 if key in _FIRST else self._top


def _lines(console: Console, host: str, jobs: Sequence[Job]) -> list[list[Segment]]:
    """Return all that there is to show, whatever the terminal's height."""
    head = Text(f"mpiddp.top on {host}, {time.strftime('%H:%M:%S')}; q quits", style="dim")
    parts: list[RenderableType] = [head]
    for job in jobs:
        parts += [Text(summary(job), style="bold"), _table(job, console.width)]
    if not jobs:
        parts.append(Text(NOBODY))
    options = console.options.update(height=None)
    return console.render_lines(Group(*parts), options, pad=False)


def _table(job: Job, width: int) -> RichTable:
    cells = table(job, width)
    shown = RichTable(box=None, padding=(0, 1), header_style="cyan", expand=True, pad_edge=False)
    for title in cells.titles[:-1]:
        shown.add_column(title, justify="right", no_wrap=True)
    shown.add_column(cells.titles[-1], ratio=1, no_wrap=True, overflow="ellipsis")
    for row, marked in zip(cells.rows, cells.marked, strict=True):
        shown.add_row(*map(Text, row), style="red" if marked else "")
    return shown


def _part(lines: Sequence[Sequence[Segment]]) -> Segments:
    found: list[Segment] = []
    for number, line in enumerate(lines):
        found += [Segment.line()] if number else []
        found += line
    return Segments(found)


@contextlib.contextmanager
def _screen(console: Console) -> Iterator[Live]:
    """Draw on the terminal's second screen; a terminal that is gone has none to leave."""
    live = Live(console=console, screen=True, auto_refresh=False)
    live.start()
    try:
        yield live
    finally:
        with contextlib.suppress(OSError):
            live.stop()


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bytes]]:
    """Let keys come at once, and unseen; yield what waits for some, as many seconds at most."""

    def read_keys(seconds: float) -> bytes:
        if select.select([descriptor], [], [], seconds)[0]:
            try:
                return os.read(descriptor, 256) or b"q"
            except OSError:  # the terminal is gone
                return b"q"
        return b""

    def wait(seconds: float) -> bytes:
        time.sleep(seconds)
        return b""

    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (AttributeError, OSError, ValueError, NameError, termios.error):
        yield wait
        return
    try:
        tty.setcbreak(descriptor)
        yield read_keys
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _end(number: int, frame: FrameType | None) -> None:
    """End this program in order: the terminal is to be as before."""
    raise SystemExit(128 + number)


def _stop() -> None:
    """Stop as without a handler, until the shell lets this program go on."""
    with _handled(signal.SIGTSTP, signal.SIG_DFL):
        os.kill(os.getpid(), signal.SIGTSTP)


@contextlib.contextmanager
def _handled(
    number: signal.Signals,
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
    *,
    ignored: bool = True,
) -> Iterator[None]:
    """Handle a signal.

    Args:
        number: the signal.
        handler: what handles it.
        ignored: whether also where it is ignored, as SIGHUP is below nohup.
    """
    if not ignored and signal.getsignal(number) == signal.SIG_IGN:
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)

"""In a terminal: it redraws, keys end it, and the terminal is as before."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import patience
import pytest
from watching import Watched, rows_with_steps, watched

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.once,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are found in /proc"),
]

SECOND_SCREEN, FIRST_SCREEN, CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"
STYLES = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


class Terminal:
    """A command in a terminal.

    Args:
        command: and its arguments.
        columns: of the terminal.
        lines: of it.
        env: is added to the environment.
    """

    def __init__(
        self, command: list[str], columns: int, lines: int, env: Mapping[str, str]
    ) -> None:
        self._ours, self.theirs = pty.openpty()
        self.resize(columns, lines)
        self.modes = termios.tcgetattr(self.theirs)
        kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            # Ctrl-C comes from the terminal that controls a session.
            [sys.executable, "-c", CONTROLLED, *command],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env={**kept, "TERM": "xterm", **env},
            start_new_session=True,
            cwd="/",
        )
        self.output = ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def until(self, pattern: str, seconds: float = 20) -> str:
        """Return what came before it, and it."""
        end = time.monotonic() + patience.enough(seconds)
        start = len(self.output)
        while not re.search(pattern, self.output[start:]):
            assert time.monotonic() < end, (pattern, self.output)
            self._read()
        return self.output[start:]

    def _read(self) -> bool:
        if not select.select([self._ours], [], [], 0.1)[0]:
            return False
        self.output += os.read(self._ours, 1 << 16).decode()
        return True

    def hang_up(self) -> None:
        """As where a connection breaks."""
        os.close(self.theirs)
        os.close(self._ours)
        self._ours = self.theirs = -1

    def end(self) -> int:
        """Wait until it has ended, and read the rest; return its status."""
        end = time.monotonic() + patience.enough(20)
        while self.process.poll() is None:  # it may wait for us to read
            assert time.monotonic() < end, self.output
            self._read()
        while self._read():
            pass
        return self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self._ours >= 0:
            os.close(self._ours)
            os.close(self.theirs)


# As below a shell that has started a program in the background, it ignores both keys at first.
CONTROLLED = """\
import fcntl, os, signal, sys, termios
for each in (signal.SIGINT, signal.SIGQUIT):
    signal.signal(each, signal.SIG_IGN)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextlib.contextmanager
def top(
    *arguments: str,
    columns: int = 60,
    lines: int = 24,
    env: Mapping[str, str] | None = None,
    hears: bool = True,
) -> Iterator[Terminal]:
    """Run it; without `hears` below nohup(1), whose own files it does not use."""
    command = [sys.executable, "-m", "mpiddp.top", *arguments]
    if not hears:
        command = ["/bin/sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command]
    terminal = Terminal(command, columns, lines, env or {})
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    pytest.importorskip("rich", reason="rich is not installed: pip install mpiddp[top]")
    with watched(tmp_path_factory.mktemp("watched"), 2, "train") as started:
        started.until(lambda seen: rows_with_steps(seen, 2, 30))
        yield started


def frames(output: str) -> list[list[str]]:
    """Return what was drawn, as lines of text, one time after the other."""
    drawn = re.split(r"\x1b\[H", output)
    return [STYLES.sub("", each).replace("\r", "").split("\n") for each in drawn[2:]]


@pytest.mark.essential
def test_it_redraws_until_q(job: Watched) -> None:
    with top(job.word, "--interval", "0.3") as terminal:
        terminal.until(r"(?s)(q quits.*){4}")
        terminal.press(b"q")
        assert terminal.end() == 0
        assert termios.tcgetattr(terminal.theirs) == terminal.modes
    assert terminal.output.count(SECOND_SCREEN) == terminal.output.count(FIRST_SCREEN) == 1
    assert CURSOR in terminal.output.partition(FIRST_SCREEN)[0]
    steps = []
    drawn = frames(terminal.output.partition(FIRST_SCREEN)[0])
    for lines in drawn[:4]:
        assert max(map(len, lines)) <= 60
        text = "\n".join(lines)
        assert lines[0].startswith("mpiddp.top on ")
        assert "ranks 0-1 of 2" in " ".join(text.split())
        assert re.search(r"^RANK +STEP +STEP/S +WAIT +FOR +NOW *$", text, re.M)
        assert re.search(r"^ +0 +\d+ +\d\S* +\d+% +1 +\S", text, re.M)
        found = re.search(r"^ +1 +(\d+) +\d\S* +\d+% +- +\S", text, re.M)
        assert found is not None
        steps.append(int(found[1]))
    assert sorted(set(steps)) == steps  # more in each


@pytest.mark.parametrize("how", ["Ctrl-C", "Ctrl-\\", "SIGTERM", "SIGHUP"])
def test_it_is_ended_from_outside(job: Watched, how: str) -> None:
    with top(job.word) as terminal:
        terminal.until(r"(?s)q quits.*RANK.*NOW.*1 +\d+")
        if how.startswith("Ctrl"):
            terminal.press({"Ctrl-C": b"\x03", "Ctrl-\\": b"\x1c"}[how])
        else:
            terminal.process.send_signal(signal.Signals[how])
        ended_by = {"Ctrl-\\": signal.SIGQUIT}.get(how) or getattr(signal, how, None)
        assert terminal.end() == (0 if ended_by is None else 128 + ended_by)
        assert termios.tcgetattr(terminal.theirs) == terminal.modes
    assert "Traceback" not in terminal.output
    assert terminal.output.rstrip().endswith(FIRST_SCREEN)
    assert CURSOR in terminal.output


def test_it_is_stopped_and_goes_on(job: Watched) -> None:
    """Ctrl-Z leaves the terminal to the shell as it was; fg draws anew."""
    terminal = Terminal(["/bin/sh", "-i"], 60, 24, {"PS1": "shell: ", "ENV": ""})
    command = f"{sys.executable} -m mpiddp.top {job.word} --interval 0.3\n"
    drawn = rf"(?s){re.escape(SECOND_SCREEN)}.*q quits.*RANK.*NOW.*1 +\d+"
    try:
        terminal.until("shell: ")
        terminal.press(command.encode())
        for columns in (100, 50):
            terminal.until(drawn)
            assert not termios.tcgetattr(terminal.theirs)[3] & termios.ECHO
            terminal.press(b"\x1a")
            stopped = terminal.until(r"(?s)Stopped.*shell: ")
            assert termios.tcgetattr(terminal.theirs) == terminal.modes
            assert stopped.index(CURSOR) < stopped.index(FIRST_SCREEN) < stopped.index("Stopped")
            terminal.press(b"echo alive\n")
            assert "q quits" not in terminal.until("alive\r\nshell: ")
            terminal.resize(columns, 24)
            terminal.press(b"fg\n")
        (first, *_) = frames(terminal.until(drawn).partition(SECOND_SCREEN)[2])
        assert max(map(len, first)) <= 50
        terminal.press(b"q")
        assert FIRST_SCREEN in terminal.until("shell: ")
        assert termios.tcgetattr(terminal.theirs) == terminal.modes
        terminal.press(b"exit\n")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.output
    finally:
        terminal.close()


@pytest.mark.parametrize("hears", [True, False], ids=["SIGHUP", "nohup"])
def test_a_terminal_that_is_gone(job: Watched, hears: bool) -> None:
    with top(job.word, hears=hears) as terminal:
        terminal.until(r"(?s)q quits.*RANK.*NOW.*1 +\d+")
        terminal.hang_up()
        status = terminal.process.wait(patience.enough(20))
        assert status == 128 + signal.SIGHUP if hears else status >= 0


def test_a_terminal_that_gets_wider(job: Watched) -> None:
    with top(job.word, "--interval", "30", columns=60) as terminal:
        assert "MEM" not in terminal.until(r"(?s)RANK.*NOW.*1 +\d+")
        terminal.resize(100, 24)
        assert re.search("CPU +MEM +PID +NOW", STYLES.sub("", terminal.until(r"PID")))
        terminal.press(b"q")
        assert terminal.end() == 0


def test_a_small_terminal(job: Watched) -> None:
    """No line is longer than it is wide, which would move all others."""
    with top(job.word, "--interval", "0.3", columns=20, lines=5) as terminal:
        terminal.until(r"(?s)(q quits.*){3}")
        terminal.press(b"j" * 40)
        terminal.until("1 +[0-9]+")
        terminal.press(b"q")
        assert terminal.end() == 0
    drawn = frames(terminal.output.partition(FIRST_SCREEN)[0])
    for lines in drawn:
        assert len(lines) <= 5
        assert max(map(len, lines)) <= 20
    assert drawn[0][0].startswith("mpiddp.top on ")


def test_more_lines_than_the_terminal_has(job: Watched) -> None:
    with top(job.word, "--interval", "30", columns=120, lines=2) as terminal:
        assert "RANK" not in terminal.until(r"q quits.*\n.*ranks 0-1")
        terminal.press(b"jj\x1b[B")
        assert "q quits" not in terminal.until("RANK")
        terminal.press(b"\x1b[6~\x1b[6~\x1b[6~\x1b[6~")
        terminal.until(r"1 +\d+ .*(operation|bucket|all_reduce)")
        terminal.press(b"g")
        terminal.until("q quits")
        terminal.press(b"q")
        assert terminal.end() == 0


def test_without_rich(job: Watched, tmp_path: Path) -> None:
    """It prints once, and says what to install."""
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError('none', name='rich')\n")
    with top(job.word, env={"PYTHONPATH": str(tmp_path)}) as terminal:
        assert terminal.end() == 0
    assert "it needs rich: python -m pip install 'mpiddp[top]'" in " ".join(terminal.output.split())
    assert "RANK" in terminal.output
    assert SECOND_SCREEN not in terminal.output
    assert max(map(len, terminal.output.replace("\r", "").split("\n")[1:])) <= 60


@pytest.mark.parametrize("way", ["--once", "TERM"])
def test_a_terminal_that_is_printed_to_once(job: Watched, way: str) -> None:
    options = ["--once"] if way == "--once" else []
    with top(job.word, *options, env={"TERM": "dumb"} if way == "TERM" else {}) as terminal:
        assert terminal.end() == 0
    assert "\x1b" not in terminal.output
    assert terminal.output.count("RANK") == 1

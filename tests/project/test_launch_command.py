"""`mpiddp launch` hands on status, words and signals; tests/elastic/test_hosts.py loses hosts."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import enough
from script_runs import clean_environment

COMMAND = str(Path(sys.executable).parent / "mpiddp")

pytestmark = [pytest.mark.timeout(200), pytest.mark.once]


def launch(*command: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [COMMAND, "launch", *command],
        env=clean_environment(),
        capture_output=True,
        timeout=enough(60),
        check=False,
    )


@pytest.mark.parametrize(("what", "status"), [("exit 0", 0), ("exit 5", 5), ("kill -9 $$", 137)])
def test_status(what: str, status: int) -> None:
    done = launch("sh", "-c", what)
    assert (done.returncode, done.stdout, done.stderr) == (status, b"", b"")


def test_output_is_the_same() -> None:
    """Also what is not text, in pieces, and more than a pipe holds."""
    program = (
        "import os\n"
        "os.write(1, b'out')\n"
        "for n in range(300): os.write(2, bytes(range(256)) * 4)\n"
        "os.write(2, b'no end of line')"
    )
    done = launch(sys.executable, "-c", program)
    assert (done.returncode, done.stdout) == (0, b"out")
    assert done.stderr == bytes(range(256)) * 1200 + b"no end of line"


def test_helpers_that_live_on_are_not_waited_for() -> None:
    done = launch("sh", "-c", "sleep 1000 & echo $! >&2")
    os.kill(int(done.stderr), signal.SIGKILL)
    assert done.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_handed_on(number: signal.Signals) -> None:
    program = (
        "import signal, time\n"
        f"signal.signal({int(number)}, lambda n, f: exit(7))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)"
    )
    with subprocess.Popen(
        [COMMAND, "launch", sys.executable, "-c", program], stdout=subprocess.PIPE
    ) as started:
        assert started.stdout is not None
        assert select.select([started.stdout], [], [], enough(60))[0]
        started.stdout.readline()
        started.send_signal(number)
        assert started.wait(enough(60)) == 7


def test_what_cannot_be_started() -> None:
    assert launch("/no/such/mpirun").returncode == 127
    assert launch().returncode == launch("-n", "4").returncode == 2

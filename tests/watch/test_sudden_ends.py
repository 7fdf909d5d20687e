"""A rank that a signal ends is named at once, before the launcher ends the others."""

import os
import signal
import socket
import textwrap
from collections.abc import Callable
from pathlib import Path

import mpirun
import pytest

import mpiddp
from mpiddp.watch.sudden_ends import SuddenEnds, exit_status


def child(action: Callable[[], object]) -> "tuple[int, int]":
    """Return the number of a process that waits, then acts and ends with 3, and its pidfd."""
    reading, writing = os.pipe()
    number = os.fork()
    if number == 0:
        os.close(writing)
        os.read(reading, 1)
        action()
        os._exit(3)
    os.close(reading)
    descriptor = os.pidfd_open(number)
    os.close(writing)
    return number, descriptor


def ended(how: Callable[[], object] = lambda: None) -> "int | None":
    number, descriptor = child(how)
    os.waitpid(number, 0)
    status = exit_status(descriptor)
    os.close(descriptor)
    return status


tells = pytest.mark.skipif(ended() is None, reason="this Linux does not tell how processes ended")


@tells
def test_status() -> None:
    status = ended()
    assert status is not None
    assert os.waitstatus_to_exitcode(status) == 3
    status = ended(lambda: signal.raise_signal(signal.SIGKILL))
    assert status is not None
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_status_of_what_lives() -> None:
    descriptor = os.pidfd_open(os.getpid())
    assert exit_status(descriptor) is None
    os.close(descriptor)


def test_stop_while_a_forked_process_lives() -> None:
    """It has the descriptors of this process, and must not keep the thread waiting."""
    descriptor = os.pidfd_open(os.getpid())
    watch = SuddenEnds(0, {1: (os.getpid(), descriptor)})
    number, forked = child(lambda: None)
    watch.stop()
    os.waitpid(number, 0)
    os.close(forked)
    os.close(descriptor)


SCRIPT = """
    import os, signal, sys
    import torch.distributed as dist
    import mpiddp

    mpiddp.init_process_group()
    if dist.get_rank() == int(sys.argv[1]):
        os.kill(os.getpid(), int(sys.argv[2]))
    if dist.get_rank() == 0 and sys.argv[2:] == ["0"]:
        raise ValueError("by itself")
    dist.barrier()
    dist.barrier()
"""


@tells
@pytest.mark.skipif(
    mpiddp.compiled_against()[0] != "Open MPI",
    reason="MPICH's launcher names process and signal, and ends all ranks at once",
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda n: n.name)
@pytest.mark.parametrize("who", [0, 1])
def test_who_is_named(tmp_path: Path, who: int, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = mpirun.run(3, [script, str(who), str(int(number))], timeout=80)
    print(done.stdout, done.stderr)
    assert done.returncode != 0
    lines = [line for line in (done.stderr + done.stdout).splitlines() if "was ended by" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"mpiddp: rank {who} (process ")
    assert lines[0].endswith(f" on {socket.gethostname()}) was ended by {number.name}")


def test_nobody_is_named_where_a_rank_raises(tmp_path: Path) -> None:
    """The launcher ends the others by signals, too."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = mpirun.run(3, [script, "0", "0"], timeout=80)
    print(done.stdout, done.stderr)
    assert "ValueError: by itself" in done.stderr
    assert "was ended by" not in done.stderr + done.stdout

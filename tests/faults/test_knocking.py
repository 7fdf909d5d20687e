"""Strangers knock at the port of a job that lets others in: it goes on as if nothing had been."""

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mpirun
import patience
import pytest

JOB = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import mpiddp
from mpiddp import elastic

folder = Path(sys.argv[1])
mpiddp.init_process_group()
sums = []

@elastic.run
def train(state):
    while True:
        total = torch.tensor([float(dist.get_rank() + 1), float((folder / "stop").exists())])
        dist.all_reduce(total)
        assert total[0] == 3
        sums.append(total)
        state.commit()
        elastic.admit(folder)
        if dist.get_rank() == 0:
            (folder / "steps").write_text(str(len(sums)))
        if total[1]:
            return
        time.sleep(0.01)

train(elastic.State(steps=0))
print("ended after", len(sums), flush=True)
mpiddp.destroy_process_group()
"""

Connect = Callable[[], socket.socket]


def random_bytes(connect: Connect) -> None:
    draw = random.Random(7)
    for _ in range(200):
        with contextlib.suppress(OSError), connect() as stranger:
            stranger.sendall(draw.randbytes(draw.randrange(300)))


def half_messages(connect: Connect) -> None:
    for count in (1, 31, 63):
        with contextlib.suppress(OSError), connect() as stranger:
            stranger.sendall(bytes(count))
            time.sleep(0.1)


def nested(connect: Connect) -> None:
    with contextlib.suppress(OSError), connect() as stranger:
        stranger.sendall(b"[" * 60000 + b"\\n")
        time.sleep(0.1)


def slow_senders(connect: Connect) -> None:
    with contextlib.ExitStack() as kept:
        slow = []
        for _ in range(20):
            with contextlib.suppress(OSError):
                slow.append(kept.enter_context(connect()))
        for _ in range(20):
            for stranger in slow:
                with contextlib.suppress(OSError):
                    stranger.sendall(b"x")
            time.sleep(0.05)


def crowd(connect: Connect, connections: int = 500) -> None:
    """As many as that at once, or one after the other where the system allows no more."""
    with contextlib.ExitStack() as kept:
        for number in range(connections):
            with contextlib.suppress(OSError):
                kept.enter_context(connect())
            if number % 400 == 399:
                kept.close()


def large_crowd(connect: Connect) -> None:
    crowd(connect, 10_000)


@pytest.fixture
def job(tmp_path: Path) -> "Iterator[subprocess.Popen[str]]":
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB))
    started = subprocess.Popen(
        [mpirun.find(), "-n", "2", sys.executable, script, tmp_path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**mpirun.os.environ, **mpirun.ENVIRONMENT},
    )
    yield started
    if started.poll() is None:
        started.send_signal(signal.SIGTERM)
    started.communicate()


@pytest.mark.once
@pytest.mark.thorough
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "strangers",
    [
        [random_bytes, half_messages, nested, slow_senders, crowd],
        pytest.param([large_crowd], marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
    ids=["of each kind", "ten thousand"],
)
def test_the_job_goes_on(
    job: "subprocess.Popen[str]", strangers: list[Callable[[Connect], None]], tmp_path: Path
) -> None:
    def steps() -> int:
        with contextlib.suppress(OSError, ValueError):
            return int((tmp_path / "steps").read_text())
        return 0

    def take_steps(more: int) -> None:
        wanted, until = steps() + more, time.monotonic() + patience.enough(40.0)
        while steps() < wanted:
            assert job.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)

    take_steps(3)
    port = json.loads((tmp_path / "mpiddp-job.json").read_bytes())["port"]
    for each in strangers:
        each(lambda: socket.create_connection(("127.0.0.1", port), 0.05))
        take_steps(3)
    (tmp_path / "stop").touch()
    printed, errors = job.communicate(timeout=patience.enough(60.0))
    assert job.returncode == 0, errors
    assert printed.count("ended after") == 2
    assert errors.count(f"does not belong to this job has connected to port {port}") == 1
    assert "Traceback" not in errors

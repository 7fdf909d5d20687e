"""Strangers knock at every port of mpiddp's own: the job goes on as if nothing had been."""

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mpirun
import patience
import pytest

# Each says where it listens, in the file "port", and how many steps it has taken.
BEGINNING = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import mpiddp
from mpiddp import elastic

folder, steps = Path(sys.argv[1]), 0

def tell(name, text):
    new = folder / f"{name}.{os.getpid()}"
    new.write_text(str(text))
    new.replace(folder / name)

def step(group=None):
    global steps
    total = torch.tensor([float(dist.get_rank() + 1), float((folder / "stop").exists())])
    dist.all_reduce(total, group=group)
    assert total[0] == 3
    steps += 1
    if dist.get_rank() == 0:
        tell("steps", steps)
    return total[1].item() == 0
"""

DOOR = """
mpiddp.init_process_group()

@elastic.run
def train(state):
    while step():
        state.commit()
        elastic.admit(folder)
        if dist.get_rank() == 0:
            tell("port", json.loads((folder / "mpiddp-job.json").read_bytes())["port"])
        time.sleep(0.01)

import json
train(elastic.State(steps=0))
"""

# Groups of Gloo come and go meanwhile.
STORE = """
import mpiddp.rendezvous.world
mpiddp.init_process_group()
store = mpiddp.rendezvous.world._world.store
tell("port", store._reached._place[1])
while step():
    group = dist.new_group(backend="gloo")
    step(group)
    dist.destroy_process_group(group)
    rank = dist.get_rank()
    store.set(f"{steps} of {rank}", str(steps))
    assert store.get(f"{steps} of {1 - rank}") == str(steps).encode()
"""

# Each rank plays a node, and the one that connects comes late, when others have come.
RING = """
from mpi4py import MPI
from mpiddp.mpi import nodes
from mpiddp.watch import ring_connections
from mpiddp.rendezvous.world import heartbeat_problem

nodes.ranks_of_node = lambda comm: comm.Split(comm.Get_rank())
listen, dial = ring_connections.listen, ring_connections._dial

def listen_and_tell(address):
    listener = listen(address)
    if MPI.COMM_WORLD.Get_rank() == 1:  # to which the other one connects
        tell("port", listener.getsockname()[1])
    return listener

def dial_late(*args):
    time.sleep(0.5)
    return dial(*args)

ring_connections.listen, ring_connections._dial = listen_and_tell, dial_late
ring_connections._PATIENCE = float(sys.argv[2])
going_on = True
while going_on:
    mpiddp.init_process_group()
    assert heartbeat_problem() == ""
    going_on = step()
    mpiddp.destroy_process_group()
mpiddp.init_process_group()
"""

END = """
print("ended after", steps, flush=True)
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


JOBS = {"door": DOOR, "store": STORE, "ring": RING}


@pytest.fixture(params=JOBS)
def job(
    request: pytest.FixtureRequest, tmp_path: Path
) -> "Iterator[tuple[str, subprocess.Popen[str]]]":
    """Return the name of a job, and the job itself."""
    script = tmp_path / "job.py"
    script.write_text(BEGINNING + JOBS[request.param] + END)
    started = subprocess.Popen(
        [mpirun.find(), "-n", "2", sys.executable, script, tmp_path, str(patience.enough(10.0))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The host's name need not be known to Gloo.
        env={**mpirun.os.environ, **mpirun.ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"},
    )
    yield request.param, started
    if started.poll() is None:
        started.send_signal(signal.SIGTERM)
    started.communicate()


@pytest.mark.once
@pytest.mark.thorough
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "strangers",
    [
        [random_bytes, half_messages, nested, slow_senders, crowd],
        pytest.param([large_crowd], marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
    ids=["of each kind", "ten thousand"],
)
def test_the_job_goes_on(
    job: "tuple[str, subprocess.Popen[str]]",
    strangers: list[Callable[[Connect], None]],
    tmp_path: Path,
) -> None:
    which, started = job

    def steps() -> int:
        with contextlib.suppress(OSError, ValueError):
            return int((tmp_path / "steps").read_text())
        return 0

    def take_steps(more: int) -> None:
        wanted, until = steps() + more, time.monotonic() + patience.enough(60.0)
        while steps() < wanted:
            assert started.poll() is None, started.communicate()
            assert time.monotonic() < until
            time.sleep(0.02)

    def connect() -> socket.socket:
        host, until = "127.0.0.1", time.monotonic() + patience.enough(20.0)
        if which == "door":
            host = json.loads((tmp_path / "mpiddp-job.json").read_bytes())["host"]
        while True:
            try:
                return socket.create_connection((host, port()), 0.05)
            except OSError:
                assert started.poll() is None, started.communicate()
                # That one listens for a moment only.
                if which != "ring" or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def port() -> int:
        return int((tmp_path / "port").read_text())

    take_steps(3)
    for each in strangers:
        each(connect)
        take_steps(3)
    last = port()
    (tmp_path / "stop").touch()
    printed, errors = started.communicate(timeout=patience.enough(60.0))
    assert started.returncode == 0, errors
    assert printed.count("ended after") == 2
    told = errors.count("something that does not belong to this job has connected to port ")
    if which == "ring":  # each new process group has a port of its own
        assert told >= 1
    else:
        assert told == errors.count(f"connected to port {last}.") == 1
    assert "Traceback" not in errors

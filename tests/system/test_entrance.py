"""Who does not know the secret is turned away, whatever it says, and keeps nobody out."""

import contextlib
import json
import secrets
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest

from mpiddp.system.entrance import Entrance, Proof
from mpiddp.system.listening import listen

SECRET = secrets.token_bytes(32)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def entrance(told: list[str]) -> Iterator[Entrance]:
    with contextlib.closing(Entrance(listen("127.0.0.1"), SECRET, told.append)) as made:
        yield made


def connect(entrance: Entrance) -> socket.socket:
    return socket.create_connection(("127.0.0.1", entrance.port), 5)


def meet(entrance: Entrance, secret: bytes = SECRET, seconds: float = 10.0) -> list[socket.socket]:
    """Connect, and return what is let in within some time."""
    with connect(entrance) as connection:
        proof, until = Proof(connection, secret), time.monotonic() + patience.enough(seconds)
        proven, done = [], False
        while not (done and proven) and time.monotonic() < until:
            done = proof.advance(b"and more")
            proven += entrance.look()
            time.sleep(1e-3)
        if proven:
            assert proven[0].recv(100) == b"and more"
        return proven


def test_who_knows_the_secret(entrance: Entrance, told: list[str]) -> None:
    for _ in range(3):
        (proven,) = meet(entrance)
        proven.close()
    assert told == []


def test_another_secret(entrance: Entrance, told: list[str]) -> None:
    with pytest.raises(OSError, match=r"closed|reset"):
        meet(entrance, secrets.token_bytes(32))
    assert len(told) == 1
    assert f"port {entrance.port}" in told[0]


def test_another_program_listens(told: list[str]) -> None:
    """It gets nothing with which it could come in elsewhere."""
    listener = listen("127.0.0.1")
    with listener, socket.create_connection(listener.getsockname()[:2], 5) as connection:
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4)
            proof = Proof(connection, SECRET)
            time.sleep(0.05)
            with pytest.raises(ConnectionError, match="another program"):
                proof.advance()


def test_another_program_pretends_to_be_the_job(entrance: Entrance) -> None:
    """It greets as the job does, and cannot prove that it is the job."""
    listener = listen("127.0.0.1")
    with listener, socket.create_connection(listener.getsockname()[:2], 5) as connection:
        accepted, _ = listener.accept()
        with accepted, connect(entrance) as known:
            entrance.look()
            accepted.sendall(known.recv(100))
            proof = Proof(connection, SECRET)
            select.select([connection], [], [], 5)
            assert not proof.advance()
            assert len(accepted.recv(100)) == 64
            accepted.sendall(secrets.token_bytes(32))
            select.select([connection], [], [], 5)
            with pytest.raises(ConnectionError, match="another program"):
                proof.advance()


def test_one_that_only_repeats(entrance: Entrance) -> None:
    """A proof holds for one connection."""
    with connect(entrance) as first, connect(entrance) as second:
        for _ in range(3):
            entrance.look()
        sent = []
        greeting = first.recv(40)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(greeting)
            assert not Proof(ours, SECRET).advance()
            sent.append(theirs.recv(64))
        second.recv(40)
        second.sendall(sent[0])
        time.sleep(0.01)
        assert entrance.look() == []
        first.sendall(sent[0])
        time.sleep(0.01)
        (proven,) = entrance.look()
        proven.close()


SAID = [
    b"",
    b"[" * 60000 + b"\n",
    b'{"secret": ',
    b"GET / HTTP/1.1\r\n\r\n",
    json.dumps({"secret": "", "ranks": 1}).encode() + b"\n",
    bytes(64),
    bytes(1 << 20),
]


@pytest.mark.parametrize("said", SAID, ids=range(len(SAID)))
@pytest.mark.parametrize("stays", [False, True])
def test_whatever_is_said(entrance: Entrance, said: bytes, stays: bool) -> None:
    with contextlib.ExitStack() as kept:
        stranger = connect(entrance)
        if stays:
            kept.enter_context(stranger)
        with contextlib.suppress(OSError):
            stranger.setblocking(False)
            stranger.send(said)
        if not stays:
            stranger.close()
        (proven,) = meet(entrance)
        proven.close()


def test_random_bytes(entrance: Entrance) -> None:
    for _ in range(300):
        with connect(entrance) as stranger:
            stranger.sendall(secrets.token_bytes(secrets.randbelow(200)))
            assert entrance.look() == []
    (proven,) = meet(entrance)
    proven.close()


def test_idle_connections(entrance: Entrance, told: list[str]) -> None:
    """It has few of them open, each for a short time."""
    with contextlib.ExitStack() as kept:
        for _ in range(100):
            kept.enter_context(connect(entrance))
        before = len(list(Path("/proc/self/fd").iterdir()))
        (proven,) = meet(entrance, seconds=30.0)
        after = len(list(Path("/proc/self/fd").iterdir()))
        proven.close()
    assert after - before < 70
    assert len(told) == 1

"""How a rank reaches the values of the store: its own on rank 0, else by a connection to rank 0."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from mpiddp.rendezvous.store_messages import YES, packed, unpacked
from mpiddp.rendezvous.stored_values import Operation, Values
from mpiddp.system.entrance import Proof

__all__ = ["Access", "Here", "There"]

# Seconds that a rank tries to reach rank 0, which listens already: many may come at once, and
# strangers may knock as well.
_PATIENCE = 20.0
# Seconds for one connection to prove itself.
_FOR_A_PROOF = 5.0
# Seconds for what waits for no key, at least.
_AT_LEAST = 60.0

_CHUNK_BYTES = 1 << 18


class Access(Protocol):
    """How this rank reaches the values."""

    def ask(self, operation: int, parts: list[bytes], timeout: timedelta) -> list[bytes]:
        """Return the answer.

        Raises:
            DistStoreError: the keys were not there in time, or it cannot be done with their values.
            DistNetworkError: there is no store any more.
            OSError: rank 0 cannot be reached.
        """

    def close(self) -> None:
        """Let those that wait fail."""


class Here:
    """The values are this process's. Not collective."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def ask(self, operation: int, parts: list[bytes], timeout: timedelta) -> list[bytes]:
        """See `Access`."""
        answers: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        waiter = self._values.ask(operation, parts, answers.put)
        try:
            answer = answers.get(timeout=_seconds(operation, timeout))
        except queue.Empty:
            raise _too_late(parts, timeout) from None
        finally:
            if waiter is not None:
                self._values.forget(waiter)
        return _checked(answer, operation, parts)

    def close(self) -> None:
        """See `Access`."""
        self._values.close()


class There:
    """The values are rank 0's. Not collective.

    Each of several threads that ask at once has a connection of its own: one may wait for a key
    that another puts.

    Args:
        address: where rank 0 listens.
        secret: of the job.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._address, self._secret = address, secret
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._all: set[socket.socket] = set()
        self._closed = False

    def ask(self, operation: int, parts: list[bytes], timeout: timedelta) -> list[bytes]:
        """See `Access`."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._connect()
        try:
            connection.settimeout(_seconds(operation, timeout))
            answer = _ask(connection, packed(operation, parts))
        except BaseException as error:
            with self._lock:
                self._all.discard(connection)
            connection.close()
            if isinstance(error, TimeoutError):
                raise _too_late(parts, timeout) from None
            if isinstance(error, OSError):
                raise dist.DistNetworkError(f"rank 0 has closed the store: {error}") from error
            raise
        with self._lock:
            self._idle.append(connection)
        return _checked(answer, operation, parts)

    def close(self) -> None:
        """See `Access`."""
        with self._lock:
            self._closed = True
            for connection in self._idle:
                connection.close()
                self._all.discard(connection)
            for connection in self._all:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._idle.clear()

    def _connect(self) -> socket.socket:
        """Return a connection whose both ends have proved that they belong to the job."""
        until = time.monotonic() + _PATIENCE
        while True:
            left = max(until - time.monotonic(), 0.001)
            connection = socket.create_connection(self._address, left)
            try:
                _prove(connection, self._secret, min(until, time.monotonic() + _FOR_A_PROOF))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:
                connection.close()
                if time.monotonic() >= until:
                    raise
                time.sleep(0.01)
                continue
            with self._lock:
                if not self._closed:
                    self._all.add(connection)
                    return connection
            connection.close()
            raise dist.DistNetworkError("the store has been closed")


def _prove(connection: socket.socket, secret: bytes, until: float) -> None:
    proof = Proof(connection, secret)
    news = select.poll()
    news.register(connection, select.POLLIN)
    while not proof.advance():
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("rank 0 does not answer")
        news.poll(left * 1000)


def _ask(connection: socket.socket, message: bytes) -> list[bytes] | None:
    connection.sendall(message)
    said = bytearray()
    while (answer := unpacked(said)) is None:
        heard = connection.recv(_CHUNK_BYTES)
        if not heard:
            raise ConnectionError("the connection has ended")
        said += heard
    return answer[1] if answer[0] == YES else None


def _seconds(operation: int, timeout: timedelta) -> float | None:
    """Return how long to wait for an answer. As for torch, 0 is for ever."""
    seconds = timeout.total_seconds()
    if seconds <= 0:
        return None
    return seconds if operation in Operation.WAITING else max(seconds, _AT_LEAST)


def _too_late(keys: list[bytes], timeout: timedelta) -> dist.DistStoreError:
    milliseconds = int(timeout.total_seconds() * 1000)
    return dist.DistStoreError(f"wait timeout after {milliseconds}ms, keys: {_words(keys)}")


def _checked(answer: list[bytes] | None, operation: int, parts: list[bytes]) -> list[bytes]:
    if answer is None:
        why = f", or the value of {_words(parts[:1])} is no number" * (operation == Operation.ADD)
        raise dist.DistStoreError(f"the store of rank 0 is closed{why}")
    return answer


def _words(keys: list[bytes]) -> str:
    return ", ".join(key.decode(errors="replace") for key in keys)

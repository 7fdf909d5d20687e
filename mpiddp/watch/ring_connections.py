"""Connect the first ranks of all nodes to a ring, by TCP; all of them or none.

A firewall, or a name that nobody knows, costs some seconds and leaves no connection.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp.mpi import addresses
from mpiddp.system.entrance import Entrance, Proof, say
from mpiddp.system.listening import listen

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Place", "connect"]

# Seconds that all of it may take.
_PATIENCE = 3.0
_NAP = 1e-3

_SECRET_BYTES = 32

# The system asks a silent node so many times within the time that it has.
_QUESTIONS = 10
# What Linux takes at most, in seconds, between two questions and in all.
_LONGEST_INTERVAL, _LONGEST = 32767, 2147483


@dataclass(frozen=True)
class Place:
    """The first rank of a node.

    Attributes:
        rank: in the world.
        process_id: on its node.
        host: its name.
        address: at which it listens; "" for all of them.
        ranks: of all the node.
        port: where it listens, 0 if it does not.
        secret: which a connection to it must know.
    """

    rank: int
    process_id: int
    host: str
    address: str
    ranks: Sequence[int]
    port: int
    secret: bytes


def connect(
    leaders: MPI.Comm, ranks: Sequence[int], seconds: float
) -> tuple[list[tuple[socket.socket, Place]], str]:
    """Return the connections to the next node and from the one before, and why there are none.

    Collective over `leaders`. Of two nodes there is one connection.

    Args:
        leaders: the first ranks of two or more nodes, one each.
        ranks: of this node, in the world.
        seconds: for which the other end may be silent, before the connection has an error.
    """
    own, count = leaders.Get_rank(), leaders.Get_size()
    problem = ""
    with contextlib.ExitStack() as opened:
        secret, port = secrets.token_bytes(_SECRET_BYTES), 0
        address = addresses.meeting_points(leaders.allgather(addresses.here()))[own]
        try:
            entrance = Entrance(listen(address), secret, say(ranks[0]))
            opened.callback(entrance.close)
            port = entrance.port
        except OSError as error:
            problem = f"rank {ranks[0]} cannot listen: {error}"
        host = socket.gethostname()
        here = Place(ranks[0], os.getpid(), host, address, ranks, port, secret)
        places = leaders.allgather(here)
        following, before = places[(own + 1) % count], places[own - 1]
        deadline = time.monotonic() + _PATIENCE
        made: list[tuple[socket.socket, Place]] = []
        with contextlib.ExitStack() as connections:
            if all(place.port for place in places):
                other, dialled = following, None
                try:
                    if count > 2 or own == 0:
                        connection = connections.enter_context(_dial(following, deadline))
                        made.append((connection, following))
                        dialled = Proof(connection, following.secret)
                    if count > 2 or own == 1:
                        other = before
                        # The other end proves itself only while it looks, too.
                        connection = _accept(entrance, deadline, dialled)
                        made.append((connections.enter_context(connection), before))
                    other = following
                    while dialled is not None and not dialled.advance():
                        _nap(deadline)
                    for connection, _ in made:
                        _set_patience(connection, seconds)
                except OSError as error:
                    problem = (
                        f"rank {here.rank} ({here.host}) has no connection with rank "
                        f"{other.rank} ({other.host}): {error}"
                    )
            problems = [text for text in leaders.allgather(problem) if text]
            if problems:
                return [], problems[0]
            connections.pop_all()
    return made, ""


def _dial(place: Place, deadline: float) -> socket.socket:
    """Connect to a rank that listens."""
    host = place.address or place.host
    problem: OSError = TimeoutError(f"{host} has no address that answers")
    for family, kind, protocol, _, address in _addresses(host, place.port, deadline):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.connect(address)
        except OSError as error:
            connection.close()
            problem = error
            continue
        return connection
    raise problem


_Addresses = list[tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]]


def _addresses(host: str, port: int, deadline: float) -> _Addresses:
    """Look a name up, which has no time limit: so a thread does."""
    found: queue.SimpleQueue[_Addresses | OSError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # type: ignore
        except OSError as error:
            found.put(error)

    threading.Thread(target=look_up, name="mpiddp look-up", daemon=True).start()
    try:
        result = found.get(timeout=max(deadline - time.monotonic(), 0.001))
    except queue.Empty:
        raise TimeoutError(f"the address of {host} is not known within {_PATIENCE:g} s") from None
    if isinstance(result, OSError):
        raise result
    return result


def _accept(entrance: Entrance, deadline: float, dialled: Proof | None) -> socket.socket:
    """Return the connection of the rank before; others may come, of whoever tries ports."""
    while True:
        if dialled is not None:
            with contextlib.suppress(OSError):  # it is raised again where that one is waited for
                dialled.advance()
        for connection in entrance.look():
            return connection
        _nap(deadline)


def _nap(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("the other end does not answer")
    time.sleep(_NAP)


def _set_patience(connection: socket.socket, seconds: float) -> None:
    """Let the system report a node that has been silent for so long."""
    interval = min(max(int(seconds / _QUESTIONS), 1), _LONGEST_INTERVAL)
    limit = int(min(seconds, _LONGEST) * 1000)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    # It stands in the place of a number of questions, and holds for the last byte too.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)

"""A socket that listens and lets in only who belongs to the job.

Other users of a machine and of its network can connect to whatever listens. So whoever connects
first proves that it knows the job's secret, which travels by MPI or in a file of the user's own.
Until then it is one of few, has a short time, and nothing is read from it but a number of bytes
that is known beforehand. The other end proves itself, too: a port may have gone to another program.

Both proofs are an HMAC (RFC 2104) of what the other end has drawn for this connection.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Entrance", "Proof", "say"]

_NAME = b"mpiddp 1"
_DRAWN_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_GREETING_BYTES = len(_NAME) + _DRAWN_BYTES
_ANSWER_BYTES = _DRAWN_BYTES + _PROOF_BYTES

# Connections that have proved nothing yet, and how many seconds each of them has; and how many
# where others wait outside.
_MOST = 64
_SECONDS = 3.0
_SECONDS_IN_A_CROWD = 0.2


@dataclass
class _Unproven:
    connection: socket.socket
    drawn: bytes = field(default_factory=lambda: secrets.token_bytes(_DRAWN_BYTES))
    said: bytes = b""
    since: float = field(default_factory=time.monotonic)


class Entrance:
    """Lets those in that know a secret. Not collective.

    Args:
        listener: a socket that listens; it is closed with this.
        secret: of the job.
        tell: is called once, with words, when a stranger has been turned away.
    """

    def __init__(
        self, listener: socket.socket, secret: bytes, tell: Callable[[str], object] = lambda _: None
    ) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._secret = secret
        self._tell: Callable[[str], object] | None = tell
        self._unproven: list[_Unproven] = []
        self._events = select.epoll()
        self._events.register(listener, select.EPOLLIN)
        # Whether those outside are let in: there is room.
        self._open = True

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def fileno(self) -> int:
        """Return a descriptor that has news when `look` has something to do."""
        return self._events.fileno()

    def seconds_left(self) -> float | None:
        """Return after how long `look` has something to do without news; None: it has not."""
        if not self._unproven:
            return None if self._open else _SECONDS_IN_A_CROWD
        limit = _SECONDS if self._open else _SECONDS_IN_A_CROWD
        return max(self._unproven[0].since + limit - time.monotonic(), 0.0)

    def look(self) -> list[socket.socket]:
        """Return the connections that have proved themselves since the last look.

        They do not block. Waits for nothing.
        """
        proven, left = [], []
        now = time.monotonic()
        for each in self._unproven:
            limit = _SECONDS if self._open else _SECONDS_IN_A_CROWD
            verdict = self._hear(each)
            if verdict:
                self._events.unregister(each.connection)
                proven.append(each.connection)
            elif verdict is None and now < each.since + limit:
                left.append(each)
            else:
                self._turn_away(each.connection)
        self._unproven = left
        room = True
        while room := room and len(self._unproven) < _MOST:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:  # nobody else is there
                break
            except OSError:  # there are no files left
                room = False
            else:
                self._greet(connection)
        if room != self._open:  # there is news of those outside only while there is room for them
            self._open = room
            self._events.modify(self._listener, select.EPOLLIN if room else 0)
        return proven

    def close(self) -> None:
        """Listen no more."""
        self._events.close()
        self._listener.close()
        for each in self._unproven:
            each.connection.close()

    def _greet(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._events.register(connection, select.EPOLLIN)
        each = _Unproven(connection)
        try:
            connection.send(_NAME + each.drawn)
        except OSError:
            self._turn_away(connection)
        else:
            self._unproven.append(each)

    def _hear(self, each: _Unproven) -> bool | None:
        """Return whether a connection has proved itself; None: it has not said all yet."""
        try:
            heard = each.connection.recv(_ANSWER_BYTES - len(each.said))
            each.said += heard
            if len(each.said) < _ANSWER_BYTES:
                return None if heard else False
            drawn, proof = each.said[:_DRAWN_BYTES], each.said[_DRAWN_BYTES:]
            if not hmac.compare_digest(proof, _proof(self._secret, b"comes", each.drawn + drawn)):
                return False
            own = _proof(self._secret, b"listens", drawn + each.drawn)
            return each.connection.send(own) == len(own)
        except BlockingIOError:
            return None
        except OSError:
            return False

    def _turn_away(self, connection: socket.socket) -> None:
        # Its copy in a forked process would go on giving news.
        self._events.unregister(connection)
        connection.close()
        tell, self._tell = self._tell, None
        if tell is not None:
            tell(
                f"something that does not belong to this job has connected to port {self.port}. It "
                f"was turned away, and so will be others"
            )


class Proof:
    """Proves to an `Entrance` that this end knows the secret, and lets it do the same.

    Not collective.

    Args:
        connection: that has just been made. It does not block from now on.
        secret: of the job.
    """

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._secret = secret
        self._drawn = secrets.token_bytes(_DRAWN_BYTES)
        self._expected = b""
        self._heard = b""
        self._done = False

    def advance(self, more: bytes = b"") -> bool:
        """Go on as far as that needs no waiting; return whether both ends have proved themselves.

        Args:
            more: what to say with this end's proof.

        Raises:
            OSError: the other end is another program, or has gone.
        """
        if self._done:
            return True
        if not self._expected:
            if not self._has_heard(_GREETING_BYTES):
                return False
            theirs = self._heard.removeprefix(_NAME)
            if len(theirs) != _DRAWN_BYTES:
                raise ConnectionError("another program listens there")
            self._expected = _proof(self._secret, b"listens", self._drawn + theirs)
            own = _proof(self._secret, b"comes", theirs + self._drawn)
            self._heard = b""
            self._connection.sendall(self._drawn + own + more)
        if not self._has_heard(_PROOF_BYTES):
            return False
        if not hmac.compare_digest(self._heard, self._expected):
            raise ConnectionError("another program listens there")
        self._done = True
        return True

    def _has_heard(self, count: int) -> bool:
        try:
            heard = self._connection.recv(count - len(self._heard))
        except BlockingIOError:
            return False
        if not heard:
            raise ConnectionError("the other end has closed the connection")
        self._heard += heard
        return len(self._heard) == count


def say(rank: int) -> Callable[[str], None]:
    """Return what says on stderr, for an `Entrance` of a rank, that a stranger came."""
    return lambda words: print(f"mpiddp: rank {rank}: {words}", file=sys.stderr, flush=True)


def _proof(secret: bytes, who: bytes, drawn: bytes) -> bytes:
    return hmac.new(secret, who + drawn, hashlib.sha256).digest()

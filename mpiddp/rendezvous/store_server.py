"""The thread of rank 0 that answers other ranks' questions to the store."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading

from mpiddp.rendezvous.store_messages import NO, YES, packed, unpacked
from mpiddp.rendezvous.stored_values import Values, Waiter
from mpiddp.system.entrance import Entrance

__all__ = ["Server"]

_CHUNK_BYTES = 1 << 18


class Server:
    """Serves values to who proves that it belongs to the job. Not collective.

    Args:
        entrance: where others come; it is closed with this.
        values: what is served.
    """

    def __init__(self, entrance: Entrance, values: Values) -> None:
        self._entrance, self._values = entrance, values
        self._peers: dict[int, _Peer] = {}
        self._events = select.epoll()
        self._end = os.eventfd(0)
        self._events.register(self._end, select.EPOLLIN)
        self._events.register(entrance.fileno(), select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="mpiddp store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and all connections."""
        os.eventfd_write(self._end, 1)
        self._thread.join()
        for peer in list(self._peers.values()):
            self._part_with(peer)
        self._entrance.close()
        self._events.close()
        os.close(self._end)

    def _serve(self) -> None:
        while True:
            for descriptor, _ in self._events.poll(self._entrance.seconds_left()):
                if descriptor == self._end:
                    return
                peer = self._peers.get(descriptor)
                if peer is not None and not peer.look():
                    self._part_with(peer)
            for connection in self._entrance.look():
                self._peers[connection.fileno()] = _Peer(connection, self._values, self._events)

    def _part_with(self, peer: _Peer) -> None:
        del self._peers[peer.connection.fileno()]
        peer.close()


class _Peer:
    """A rank that is connected: it asks one thing at a time, and then waits."""

    def __init__(self, connection: socket.socket, values: Values, events: select.epoll) -> None:
        self.connection = connection
        self._values, self._events = values, events
        self._said = bytearray()
        self._waiter: Waiter | None = None
        # Whichever thread has put what was waited for sends the answer.
        self._sending = threading.Lock()
        self._unsent = bytearray()
        self._waits_to_send = False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        events.register(connection, select.EPOLLIN)

    def look(self) -> bool:
        """Hear what it says, send what is left; return whether it is still there."""
        try:
            self._send()
            said = self.connection.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._said += said
        while (asked := unpacked(self._said)) is not None:
            self._waiter = self._values.ask(*asked, self._answer)
        return bool(said)

    def close(self) -> None:
        if self._waiter is not None:
            self._values.forget(self._waiter)
        with self._sending:
            # Whose copy a forked process has would go on giving news.
            self._events.unregister(self.connection)
            self.connection.close()

    def _answer(self, parts: list[bytes] | None) -> None:
        message = packed(NO, []) if parts is None else packed(YES, parts)
        with self._sending:
            self._unsent += message
        with contextlib.suppress(OSError):  # it has gone, which is seen where it is heard
            self._send()

    def _send(self) -> None:
        with self._sending:
            if not self._unsent or self.connection.fileno() < 0:
                return
            with contextlib.suppress(BlockingIOError):
                del self._unsent[: self.connection.send(self._unsent)]
            if bool(self._unsent) != self._waits_to_send:
                self._waits_to_send = not self._waits_to_send
                more = select.EPOLLOUT if self._waits_to_send else 0
                self._events.modify(self.connection, select.EPOLLIN | more)

"""A socket that listens, on a free port unless one is given."""

from __future__ import annotations

import socket

__all__ = ["listen"]


def listen(host: str = "", waiting: int | None = None, port: int = 0) -> socket.socket:
    """Return a socket that listens, by IPv4 and IPv6 unless `host` is given. Not collective.

    Args:
        host: an address of this machine; "": all of them.
        waiting: how many connections the system keeps that nobody has taken; None: its default.
        port: 0: a free one.

    Raises:
        OSError: the system allows no such socket.
    """
    if not host and socket.has_dualstack_ipv6():
        v6 = socket.AF_INET6
        return socket.create_server((host, port), family=v6, backlog=waiting, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=waiting)

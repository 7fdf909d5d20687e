"""A socket that listens on a free port."""

from __future__ import annotations

import socket

__all__ = ["listen"]


def listen(host: str = "") -> socket.socket:
    """Return a socket that listens, by IPv4 and IPv6 unless `host` is given. Not collective.

    Args:
        host: an address of this machine; "": all of them.

    Raises:
        OSError: the system allows no such socket.
    """
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server((host, 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, 0))

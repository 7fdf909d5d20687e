"""The store of torchrun's agent, for scripts that connect to it by themselves.

Under torchrun the agent serves a store at MASTER_ADDR and MASTER_PORT, and a script may construct
clients of it: `TCPStore(address, port, is_master=False)`. Here nobody listens there, and a script,
such as one with torch's RPC, may serve a store of its own. So rank 0 serves one only when it
constructs a client itself and nobody listens; clients of other ranks try until then.

torch's clients cannot prove that they belong to the job, so this store is open to whoever reaches
it, as torchrun's is. It listens on the loopback where all ranks share a node, else at the one
address that MASTER_ADDR names.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

from mpiddp.mpi.nodes import Topology
from mpiddp.system import listening

__all__ = ["serve_on_demand"]

_ARGUMENTS = ("host_name", "port", "world_size", "is_master")
# Seconds for a connection to this machine.
_PATIENCE = 1.0

# Kept as long as the process, which the clients are.
_served: list[TCPStore] = []


def serve_on_demand(topology: Topology) -> None:
    """Let a client that rank 0 constructs find a store. Not collective.

    Args:
        topology: this process's place; only on rank 0 anything is done.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if topology.rank != 0 or address is None or not port.isdecimal():
        return
    agents = (address, int(port))
    one_node = topology.node_count == 1
    process_id = os.getpid()
    plain = TCPStore.__init__

    def __init__(self: TCPStore, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        there = given.get("host_name"), given.get("port")
        is_client = there == agents and not given.get("is_master")
        if is_client and os.getpid() == process_id and not _listens(*agents):
            _serve("127.0.0.1" if one_node else _named(*agents), agents[1])
        plain(self, *args, **kwargs)

    TCPStore.__init__ = __init__  # type: ignore[method-assign]


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _PATIENCE).close()
    except OSError:
        return False
    return True


def _named(address: str, port: int) -> str:
    """Return the one address of this machine that a name stands for elsewhere, "" if unknown."""
    try:
        told = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    found = {str(one[4][0]) for one in told}
    # Many machines name themselves 127.0.1.1, and the others know another address.
    only = found.pop() if len(found) == 1 else "127."
    return "" if only.startswith(("127.", "::1")) else only


def _serve(address: str, port: int) -> None:
    listener = listening.listen(address, port=port)
    _served.append(
        TCPStore(
            address or "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the server closes it
        )
    )

"""The store of torch.distributed, served and reached only when somebody uses it.

Note [A store that nobody uses]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch.distributed wants a store that all ranks share. mpiddp never uses it, but groups of other
backends do. A connection of every rank to rank 0 would cost time at every start and, with some
thousand ranks, more files than a process may open. So rank 0 only listens, and a thread sleeps
until the first one comes; a rank connects when it first uses the store.

Note [A store of our own]
~~~~~~~~~~~~~~~~~~~~~~~~~
torch's TCPStore lets in whoever connects: anybody on the node or in its network could read and
change what the ranks tell each other, such as where they listen. A guard in front of it is none:
its server has a port too, which others could use. So the values are kept here, behind a proof that
the other end belongs to the job (entrance.py).
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from mpiddp.engine import forks
from mpiddp.mpi import addresses
from mpiddp.rendezvous.store_client import Access, Here, There
from mpiddp.rendezvous.store_server import Server
from mpiddp.rendezvous.stored_values import Operation, Values
from mpiddp.system.entrance import Entrance, say
from mpiddp.system.listening import listen

if TYPE_CHECKING:
    from mpi4py import MPI

_SECRET_BYTES = 32
# Connections that the system keeps waiting: ranks come all at once.
_WAITING = 1024

_Value = str | bytes


class _Reached:
    """How a process reaches the values, or why it does not."""

    def __init__(self, rank: int, place: tuple[str, int], access: Access, problem: str) -> None:
        self._rank, self._place, self._access, self._problem = rank, place, access, problem
        self._closed = False

    def ask(self, operation: int, parts: list[bytes], timeout: timedelta) -> list[bytes]:
        forks.check("the store of torch.distributed")
        if self._closed:
            raise RuntimeError("the process group of this store has been destroyed")
        try:
            if self._problem:
                raise ConnectionError(self._problem)
            return self._access.ask(operation, parts, timeout)
        except OSError as error:
            host, port = self._place
            raise ConnectionError(
                f"rank {self._rank} does not reach the store of rank 0 ({host}:{port}), which "
                f'groups of other backends need, such as new_group(backend="gloo"): {error}'
            ) from error

    def close(self) -> None:
        self._closed = True
        self._access.close()


class _JobStore(Store):
    """What torch calls, some of it by its C++ name.

    On a store written in Python it calls no queue functions and no list_keys: see `StoreOfGroup`.
    Python must hold it for as long as torch does: torch keeps only the C++ half.
    """

    timeout: timedelta  # torch's own property, which its stubs leave out

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._reached: _Reached
        self._clones: list[_JobStore] = []

    def _ask(
        self, operation: int, parts: Sequence[_Value], timeout: timedelta | None = None
    ) -> list[bytes]:
        asked = [part.encode() if isinstance(part, str) else bytes(part) for part in parts]
        return self._reached.ask(operation, asked, self.timeout if timeout is None else timeout)

    def set(self, key: str, value: _Value) -> None:
        self._ask(Operation.PUT, [key, value])

    def get(self, key: str) -> bytes:
        return self._ask(Operation.GET, [key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(Operation.ADD, [key, str(amount)])[0])

    def compare_set(self, key: str, expected: _Value, desired: _Value) -> bytes:
        return self._ask(Operation.COMPARE, [key, expected, desired])[0]

    def check(self, keys: list[str]) -> bool:
        return self._ask(Operation.CHECK, keys) == [b"1"]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask(Operation.WAIT, keys, timeout)

    def append(self, key: str, value: _Value) -> None:
        self._ask(Operation.APPEND, [key, value])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._ask(Operation.GET, keys)

    def multi_set(self, keys: list[str], values: list[_Value]) -> None:
        self._ask(Operation.PUT, [part for pair in zip(keys, values, strict=True) for part in pair])

    def deleteKey(self, key: str) -> bool:
        return self._ask(Operation.DELETE, [key]) == [b"1"]

    def getNumKeys(self) -> int:
        return int(self._ask(Operation.COUNT, [])[0])

    def list_keys(self, beginning: str = "") -> list[str]:
        return [key.decode(errors="replace") for key in self._ask(Operation.KEYS, [beginning])]

    def queue_push(self, key: str, value: _Value) -> None:
        self._ask(Operation.PUSH, [key, value])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        values = self._ask(Operation.POP if block else Operation.TAKE, [key])
        if not values:
            raise dist.QueueEmptyError("queue is empty")
        return values[0]

    def queue_len(self, key: str) -> int:
        return int(self._ask(Operation.LENGTH, [key])[0])

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Store:
        made = _JobStore(self.timeout)
        made._reached = self._reached
        self._clones.append(made)
        return made


class LazyStore(_JobStore):
    """A store on rank 0 that all ranks share, like torch's TCPStore.

    Collective over `communicator`; everything else is not collective. Several threads may use it.

    Args:
        communicator: of all ranks.
        one_node: whether they all share a node, and the store need not be seen from elsewhere.
        timeout: how long `get` and `wait` wait for a key.

    Raises:
        ConnectionError: in a method: this rank cannot reach rank 0 by TCP.
        RuntimeError: in a method: the store is closed, or a key was not there in time.
    """

    def __init__(self, communicator: MPI.Intracomm, one_node: bool, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._server: Server | None = None
        rank, address = communicator.Get_rank(), addresses.LOOPBACK
        if not one_node:
            nodes = communicator.gather(addresses.here())
            address = "" if nodes is None else addresses.meeting_points(nodes)[0]
        values, entrance = Values(), None
        secret, place, problem = secrets.token_bytes(_SECRET_BYTES), (address, 0), ""
        if rank == 0 and communicator.Get_size() > 1:
            try:
                entrance = Entrance(listen(address, _WAITING), secret, say(rank))
            except OSError as error:
                problem = f"rank 0 cannot listen: {error}"
            else:
                place = address or socket.gethostname(), entrance.port
        place, secret, problem = communicator.bcast((place, secret, problem))
        access = Here(values) if rank == 0 else There(place, secret)
        self._reached = _Reached(rank, place, access, problem)
        if entrance is not None:
            self._server = Server(entrance, values)

    def close(self) -> None:
        """End the server, or the connection to it. Harmless when called twice."""
        if forks.forked():
            return  # both are the parent's, and so may be the locks
        self._reached.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()


class StoreOfGroup(PrefixStore):
    """The keys of one group in a store, as torch's PrefixStore, and also its queues.

    Not collective. torch's own asks no store that is written in Python for queues or all keys.

    Args:
        prefix: what the keys begin with.
        store: whose keys they are.
    """

    def __init__(self, prefix: str, store: LazyStore) -> None:
        super().__init__(prefix, store)
        self._beginning, self._store = f"{prefix}/", store

    def list_keys(self) -> list[str]:
        """Return all keys of the group."""
        begin = len(self._beginning)
        return [key[begin:] for key in self._store.list_keys(self._beginning)]

    def queue_push(self, key: str, value: _Value) -> None:
        """Append a value to a queue."""
        self._store.queue_push(self._beginning + key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove the first value of a queue, and return it.

        Args:
            key: of the queue.
            block: whether to wait for one if there is none.

        Raises:
            DistStoreError: there was none in time.
            QueueEmptyError: there is none, and `block` is not set.
        """
        return self._store.queue_pop(self._beginning + key, block)

    def queue_len(self, key: str) -> int:
        """Return how many values a queue has."""
        return self._store.queue_len(self._beginning + key)


def give_queues() -> None:
    """Let the default store of torch.distributed have queues, if it is one of ours."""
    world: Any = dist.group.WORLD
    groups: Any = dist.distributed_c10d._world.pg_map
    backend, store = groups[world]
    inner = getattr(store, "underlying_store", None)
    if isinstance(inner, LazyStore):
        groups[world] = backend, StoreOfGroup(f"{world.group_name}/", inner)

"""The store of torch.distributed, served and reached only when somebody uses it.

Note [A store that nobody uses]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch.distributed wants a store that all ranks share. mpiddp never uses it, but groups of other
backends do. A TCPStore takes 2 ms of every start, more than all else together, and a connection
of every rank to rank 0: with some thousand ranks, more files than a process may open. So rank 0
only listens, to get a port; the system keeps connections waiting. A thread sleeps until the first
one comes, and then makes the server; a rank connects when it first uses the store.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Store, TCPStore

from mpiddp.engine import forks
from mpiddp.system.listening import listen

if TYPE_CHECKING:
    from mpi4py import MPI

# Seconds that a rank tries to reach rank 0, which listens already.
_PATIENCE = 5.0


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: LazyStore, *args: Any) -> Any:
        return getattr(self._store(), name)(*args)

    return call


class LazyStore(Store):
    """A TCPStore on rank 0 that all ranks share, made at its first use.

    Collective over `communicator`; everything else is not collective. Python must hold it for as
    long as torch does: torch keeps only the C++ half.

    Args:
        communicator: of all ranks.
        one_node: whether they all share a node, and the store need not be seen from elsewhere.
        timeout: how long `get` and `wait` wait for a key.

    Raises:
        ConnectionError: in a method: this rank cannot reach rank 0 by TCP.
        RuntimeError: in a method: the store is closed.
    """

    timeout: timedelta  # torch's own property, which its stubs leave out

    def __init__(self, communicator: MPI.Intracomm, one_node: bool, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._rank = communicator.Get_rank()
        self._opening = threading.Lock()
        self._opened: TCPStore | None = None
        self._closed = False
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._no_longer_waiting = -1
        host, port, problem = "127.0.0.1" if one_node else "", 0, ""
        if self._rank == 0:
            try:
                self._listener = listen(host)
            except OSError as error:
                problem = f"rank 0 cannot listen: {error}"
            else:
                host, port = host or socket.gethostname(), self._listener.getsockname()[1]
        self._host, self._port, self._problem = communicator.bcast((host, port, problem))
        if self._listener is not None and communicator.Get_size() > 1:
            self._no_longer_waiting = os.eventfd(0)
            self._thread = threading.Thread(
                target=self._serve_on_demand, name="mpiddp store", daemon=True
            )
            self._thread.start()

    def _serve_on_demand(self) -> None:
        """Make the server when the first connection comes, unless this rank was quicker."""
        assert self._listener is not None
        events = select.poll()
        events.register(self._listener, select.POLLIN)
        events.register(self._no_longer_waiting, select.POLLIN)
        events.poll()
        with self._opening:
            if not self._closed and self._opened is None:
                self._opened = self._serve()

    def _serve(self) -> TCPStore:
        assert self._listener is not None
        if self._thread is not None:
            os.eventfd_write(self._no_longer_waiting, 1)
        return TCPStore(
            "127.0.0.1",
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),  # the server closes it
            timeout=self.timeout,
        )

    def _connect(self) -> TCPStore:
        # torch's client would try for a minute, with a C++ trace on stderr at each try.
        socket.create_connection((self._host, self._port), _PATIENCE).close()
        return TCPStore(
            self._host, self._port, is_master=False, wait_for_workers=False, timeout=self.timeout
        )

    def _store(self) -> TCPStore:
        forks.check("the store of torch.distributed")
        with self._opening:
            if self._closed:
                raise RuntimeError("the process group of this store has been destroyed")
            if self._opened is None:
                try:
                    if self._problem:
                        raise ConnectionError(self._problem)
                    self._opened = self._serve() if self._rank == 0 else self._connect()
                except OSError as error:
                    raise ConnectionError(
                        f"rank {self._rank} does not reach the store of rank 0 "
                        f"({self._host}:{self._port}), which groups of other backends need, such "
                        f'as new_group(backend="gloo"): {error}'
                    ) from error
            self._opened.set_timeout(self.timeout)  # it may have changed since
            return self._opened

    def close(self) -> None:
        """End the server, or the connection to it. Harmless when called twice."""
        if forks.forked():
            return  # both are the parent's, and so may be the lock
        with self._opening:
            self._closed = True
            self._opened = None
        if self._thread is not None:
            os.eventfd_write(self._no_longer_waiting, 1)
            self._thread.join()
            self._thread = None
            os.close(self._no_longer_waiting)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # What torch calls, some of it by its C++ name. On a store written in Python it calls no queue
    # functions and no list_keys.
    set = _forwarded("set")
    get = _forwarded("get")
    add = _forwarded("add")
    compare_set = _forwarded("compare_set")
    check = _forwarded("check")
    wait = _forwarded("wait")
    append = _forwarded("append")
    multi_get = _forwarded("multi_get")
    multi_set = _forwarded("multi_set")
    deleteKey = _forwarded("delete_key")
    getNumKeys = _forwarded("num_keys")
    has_extended_api = _forwarded("has_extended_api")
    clone = _forwarded("clone")

"""The store of torch.distributed: made when it is first used, and then like torch's own."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from mpi4py import MPI
from replicas import RANK, SIZE, gather, together
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

from mpiddp.rendezvous import store_client
from mpiddp.rendezvous.store import LazyStore, StoreOfGroup
from mpiddp.rendezvous.store_client import There
from mpiddp.rendezvous.store_messages import packed
from mpiddp.rendezvous.stored_values import Operation

several = pytest.mark.mpi(min_size=2)
pytestmark = pytest.mark.mpi

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def store() -> Iterator[LazyStore]:
    made = LazyStore(MPI.COMM_WORLD, True, TIMEOUT)
    yield made
    MPI.COMM_WORLD.Barrier()
    made.close()


def descriptors() -> list[str]:
    paths = (path for path in Path("/proc/self/fd").iterdir() if path.exists())
    return sorted(os.readlink(path) for path in paths)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "mpiddp store"]


def is_open(store: LazyStore) -> bool:
    """Say whether this rank has a connection."""
    if store._server is not None:
        return bool(store._server._peers)
    access = store._reached._access
    return isinstance(access, There) and bool(access._all)


@pytest.mark.smoke
def test_shared_by_all(store: LazyStore) -> None:
    store.set(f"of rank {RANK}", str(RANK))
    for other in range(SIZE):
        assert store.get(f"of rank {other}") == str(other).encode()


@several
def test_rank_0_serves_others_though_it_never_uses_it(store: LazyStore) -> None:
    users = store.add("users", 1) if RANK > 0 else 0
    MPI.COMM_WORLD.Barrier()
    with together():
        assert users <= SIZE - 1
        assert is_open(store)


@several
@pytest.mark.essential
def test_nobody_connects_who_does_not_use_it(store: LazyStore) -> None:
    if RANK == SIZE - 1:
        store.set("key", "value")
    MPI.COMM_WORLD.Barrier()
    with together():
        assert is_open(store) == (RANK in (0, SIZE - 1))


def _answers(store: Store) -> list[Any]:
    """Call everything that a store offers through a PrefixStore, as torch.distributed does."""
    store = PrefixStore("prefix", store)
    answers: list[Any] = [
        store.set("binary", b"\xff\x00"),
        store.get("binary"),
        store.add("number", 2),
        store.add("number", 3),
        store.check(["number"]),
        store.check(["number", "absent"]),
        store.wait(["number"]),
        store.wait(["number"], timedelta(seconds=1)),
        store.compare_set("not there", "other", "second"),
        store.compare_set("new", "", "first"),
        store.compare_set("new", "other", "second"),
        store.compare_set("new", "first", "second"),
        store.append("new", " and more"),
        store.multi_set(["a", "b"], ["1", "2"]),
        store.multi_get(["a", "b", "new"]),
        store.delete_key("a"),
        store.delete_key("a"),
        store.check(["a"]),
        store.has_extended_api(),
        store.clone().get("b"),
    ]
    return answers


@pytest.mark.essential
def test_answers_like_torchs(store: LazyStore) -> None:
    if RANK == 0:
        torchs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        assert _answers(store) == _answers(torchs)
        assert store.num_keys() == torchs.num_keys() > 0


def test_waits_as_long_as_it_was_told(store: LazyStore) -> None:
    prefixed = PrefixStore("prefix", store)
    assert prefixed.timeout == TIMEOUT
    prefixed.set_timeout(timedelta(seconds=0.1))
    for wait in (
        lambda: prefixed.get("absent"),
        lambda: store.wait(["absent"]),
        lambda: prefixed.wait(["absent"], timedelta(seconds=0.2)),
    ):
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="timeout"):
            wait()
        assert time.monotonic() - began < 10


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("use", [False, True], ids=["unused", "used"])
def test_nothing_is_left(use: bool) -> None:
    LazyStore(MPI.COMM_WORLD, True, TIMEOUT).close()
    before, running = descriptors(), threads()
    store = LazyStore(MPI.COMM_WORLD, True, TIMEOUT)
    waiting = threads()
    MPI.COMM_WORLD.Barrier()  # the thread ends when another rank uses the store
    assert (len(waiting) > len(running)) == (RANK == 0 and SIZE > 1)
    if use:
        store.set("key", "value")
    MPI.COMM_WORLD.Barrier()
    store.close()
    store.close()
    with together():
        assert threads() == running
        for _ in range(100):  # the server's own thread may be at its end still
            if (left := descriptors()) == before:
                break
            time.sleep(0.05)
        assert left == before
    with pytest.raises(RuntimeError, match="has been destroyed"):
        store.get("key")


@several
def test_rank_that_does_not_reach_it(monkeypatch: pytest.MonkeyPatch, store: LazyStore) -> None:
    def refuse(*args: object) -> socket.socket:
        raise OSError("no route to host")

    monkeypatch.setattr(socket, "create_connection", refuse)
    if RANK == 0:
        assert store.add("number", 1) == 1
    else:
        match = f'rank {RANK} does not reach the store .*backend="gloo".*: no route to host'
        with pytest.raises(ConnectionError, match=match):
            PrefixStore("prefix", store).get("number")


def test_rank_0_that_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank is left waiting, and those that want the store are told."""

    def refuse(*args: object, **settings: object) -> socket.socket:
        raise OSError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_server", refuse)
        store = LazyStore(MPI.COMM_WORLD, True, TIMEOUT)
    with together(), pytest.raises(ConnectionError, match="rank 0 cannot listen: too many"):
        store.set("key", "value")
    store.close()


@several
def _from_queues(store: Any) -> list[Any]:
    """Use queues, and list keys."""
    said: list[Any] = [store.queue_len("q"), store.check(["q"])]
    for value in ("a", "b", "c"):
        store.queue_push("q", value)
    said += [store.queue_len("q"), store.check(["q"]), store.wait(["q"]), store.queue_pop("q")]
    store.set("key", "value")
    said += [store.queue_pop("q", False), store.list_keys(), store.queue_pop("q")]
    store.set_timeout(timedelta(seconds=0.2))
    for block in (False, True):
        with pytest.raises(DistStoreError if block else dist.QueueEmptyError) as caught:
            store.queue_pop("q", block)
        said.append(type(caught.value))
    return said


@pytest.mark.essential
def test_queues_and_keys_like_torchs(store: LazyStore) -> None:
    if RANK == 0:
        torchs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ours = StoreOfGroup("prefix", store)
        store.set("other/key", "value")
        assert _from_queues(ours) == _from_queues(PrefixStore("prefix", torchs))


def test_default_store_has_queues(world: None) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.queue_push(f"of {RANK}", "value")
    assert store.queue_pop(f"of {(RANK + 1) % SIZE}") == b"value"


@several
def test_who_waits_for_a_queue(store: LazyStore) -> None:
    """One value wakes one rank, and what a rank that has gone would have taken is left."""
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(DistStoreError, match="keys: q"):
        store.queue_pop("q")
    MPI.COMM_WORLD.Barrier()
    store.set_timeout(TIMEOUT)
    with ThreadPoolExecutor(1) as pool:
        popped = pool.submit(store.queue_pop, "q")
        MPI.COMM_WORLD.Barrier()
        if RANK == 0:
            for number in range(SIZE):
                store.queue_push("q", str(number))
        values = gather(popped.result())
    assert sorted(values) == [str(number).encode() for number in range(SIZE)]
    assert store.queue_len("q") == 0


def test_threads_do_not_wait_for_each_other(store: LazyStore) -> None:
    """One may wait for what another one sets; and so may what torch clones."""
    other = store.clone()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(store.get, f"of {RANK}"), pool.submit(other.get, f"of {RANK}")]
        time.sleep(0.1)
        other.set_timeout(timedelta(seconds=1))
        store.set(f"of {RANK}", b"\x00" * 3_000_000)  # more than a socket takes at once
        with together():
            assert [len(each.result()) for each in waiting] == [3_000_000] * 2
            assert store.timeout == TIMEOUT


@several
def test_what_is_no_number(store: LazyStore) -> None:
    store.set(f"word {RANK}", "none")
    with together(), pytest.raises(DistStoreError, match=f"the value of word {RANK} is no number"):
        store.add(f"word {RANK}", 1)
    assert store.get(f"word {RANK}") == b"none"


@several
def test_a_rank_that_waits_when_the_store_is_closed(store: LazyStore) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "absent")
        while RANK == 0 and len(store._server._values._waiting.get(b"absent", ())) < SIZE:
            time.sleep(0.01)
        MPI.COMM_WORLD.Barrier()
        store.close()
        with together(), pytest.raises(RuntimeError, match="store"):
            waiting.result()


def read_and_write(place: tuple[str, int]) -> None:
    """Do what a stranger can do with torch's own client."""
    with socket.create_connection(place, 5) as probe:
        probe.settimeout(0.5)
        probe.sendall(packed(Operation.PUT, [b"key", b"changed"]))
    TCPStore(*place, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))


@several
def test_who_does_not_belong_to_the_job(
    store: LazyStore, capfd: pytest.CaptureFixture[str]
) -> None:
    if RANK == 0:
        store.set("key", "value")
    MPI.COMM_WORLD.Barrier()
    place = store._reached._place
    with together():
        assert place[0] == "127.0.0.1"
        if RANK == SIZE - 1:
            with pytest.raises(RuntimeError):
                read_and_write(place)
            wrong = There(place, b"another secret")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(store_client, "_PATIENCE", 0.3)
                with pytest.raises(OSError, match=r"closed|reset|does not answer"):
                    wrong.ask(Operation.GET, [b"key"], TIMEOUT)
        assert store.get("key") == b"value"
    MPI.COMM_WORLD.Barrier()
    said = capfd.readouterr().err.count("does not belong to this job has connected to port")
    assert MPI.COMM_WORLD.allreduce(said) == 1

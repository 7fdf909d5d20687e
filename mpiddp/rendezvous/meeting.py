"""A job that runs meets one that comes to it, at an address in a folder that both see.

Rank 0 of the job that runs listens, and writes its address and a secret into the folder, for its
user alone. Rank 0 of the one that comes connects to it, proves that it knows the secret (see
entrance.py), says what it is, and waits. When the others are at the end of a step, the two
worlds connect (MPI 4.1, section 11.9), and a communicator of all is merged from both sides.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiddp import settings
from mpiddp.mpi import addresses
from mpiddp.rendezvous import launch_checks
from mpiddp.system.entrance import Entrance, Proof, say
from mpiddp.system.listening import listen

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["close", "come", "let_in", "look"]

_ADDRESS = "mpiddp-job.json"
_LONGEST_LINE = 1 << 16
# Seconds for a job to say what it is, and to answer that it is there.
_PATIENCE = 10.0
# Seconds between two looks of the job that comes.
_NAP = 0.1

_OPEN_MPI = (
    "Open MPI does not connect the jobs of two mpiruns. elastic.grow() starts more ranks; with "
    "MPICH a job can come"
)


@dataclass
class _Guest:
    """The connection of a job that comes; it has 0 ranks until it has said how many."""

    connection: socket.socket
    ranks: int = 0
    said: bytes = b""
    since: float = field(default_factory=time.monotonic)


class _Door:
    """Where rank 0 of a job that runs listens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._guests: list[_Guest] = []
        self._secret = secrets.token_hex(32)
        self._host = addresses.outward()
        self._entrance = Entrance(listen(self._host), bytes.fromhex(self._secret), say(0))
        self._address = folder / _ADDRESS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._write_address()
        except OSError:
            self._entrance.close()
            raise

    def _write_address(self) -> None:
        where = {"host": self._host or socket.gethostname(), "port": self._entrance.port}
        # In a folder where others may write, nobody can have made it, nor read it.
        new = self._address.with_suffix(f".{secrets.token_hex(8)}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with open(descriptor, "w") as file:
                json.dump({**where, "secret": self._secret}, file)
            os.replace(new, self._address)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def look(self) -> int:
        """Return the ranks of the first job that waits, 0 if none does. Waits for nothing."""
        self._guests += map(_Guest, self._entrance.look())
        self._guests = [guest for guest in self._guests if self._stays(guest)]
        return next((guest.ranks for guest in self._guests if guest.ranks), 0)

    def _stays(self, guest: _Guest) -> bool:
        """Hear what it says; return whether it is to wait on."""
        problem = ""
        try:
            heard = guest.connection.recv(_LONGEST_LINE)
            guest.said += heard
            if heard and not guest.ranks and guest.said.endswith(b"\n"):
                guest.ranks, problem = self._judge(json.loads(guest.said))
                if problem:
                    guest.connection.sendall(_line({"refused": problem}))
            stays = bool(heard) and not problem and len(guest.said) < _LONGEST_LINE
        except BlockingIOError:
            stays = guest.ranks > 0 or time.monotonic() - guest.since < _PATIENCE
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            stays = False
        if not stays:
            guest.connection.close()
        return stays

    def _judge(self, said: dict[str, Any]) -> tuple[int, str]:
        """Return how many ranks come, and why they cannot, if so."""
        own = launch_checks.compared()
        differences = [
            f"{name} is {said['compared'].get(name)} here and {value} there"
            for name, value in own.items()
            if said["compared"].get(name) != value
        ]
        return int(said["ranks"]), "; ".join(differences)

    def call_in(self) -> str | None:
        """Return a port of MPI to which the first job that waits will connect; None: it is gone."""
        from mpi4py import MPI

        guest = next((guest for guest in self._guests if guest.ranks), None)
        if guest is None:
            return None
        self._guests.remove(guest)
        port = MPI.Open_port()
        with guest.connection as connection:
            try:
                connection.settimeout(_PATIENCE)
                connection.sendall(_line({"port": port}))
                if connection.recv(1):
                    return port
            except OSError:
                pass
        MPI.Close_port(port)
        return None

    def close(self) -> None:
        self._entrance.close()
        for guest in self._guests:
            guest.connection.close()
        with contextlib.suppress(OSError, ValueError):
            if _read_address(self._address)["secret"] == self._secret:
                self._address.unlink()


_door: _Door | None = None


def look(folder: Path, ranks: MPI.Intracomm) -> int:
    """Return how many ranks the first job has that waits at `folder`, 0 if none does.

    Collective over `ranks`, those of a job that runs; the message is one of a broadcast.

    Raises:
        OSError: rank 0 cannot write to the folder, or listen.
    """
    global _door
    told: tuple[int, OSError | None] = (0, None)
    if ranks.Get_rank() == 0:
        try:
            if _door is None or _door.folder != folder:
                close()
                _door = _Door(folder)
            told = (_door.look(), None)
        except OSError as error:
            told = (0, error)
    told = ranks.bcast(told)
    count, problem = told
    if problem is not None:
        raise problem
    return count


def let_in(ranks: MPI.Intracomm, count: int) -> MPI.Intracomm | None:
    """Return a communicator of these ranks, which come first, and those of the job that waits.

    Collective over `ranks`; ends when the other job has called `come`. None if it has gone.

    Args:
        ranks: of the job that runs.
        count: how many come, which is not used: the job that waits has as many as it has.

    Raises:
        MPI.Exception: the MPI does not connect them, or a rank was lost meanwhile.
    """
    from mpi4py import MPI

    door = _door if ranks.Get_rank() == 0 else None
    port = ranks.bcast(None if door is None else door.call_in())
    if port is None:
        return None
    try:
        others = ranks.Accept(port)
    finally:
        if door is not None:
            MPI.Close_port(port)
    joined = others.Merge(high=False)
    others.Free()
    return joined


def close() -> None:
    """Listen no more. Not collective."""
    global _door
    if _door is not None:
        _door.close()
    _door = None


def come(folder: Path, ranks: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks of the job at `folder`, which come first, and of these.

    Collective over `ranks`, all of a job that comes, and with the `let_in` of the others.

    Raises:
        RuntimeError: there was no such job within MPIDDP_START_SECONDS, or it refused this one.
        MPI.Exception: the MPI does not connect them.
    """
    from mpi4py import MPI

    connection, port, problem = None, "", ""
    if ranks.Get_rank() == 0:
        try:
            connection, port = _ask(folder, ranks.Get_size(), MPI.get_vendor()[0])
        except RuntimeError as error:
            problem = str(error)
    answered = ranks.Ibarrier()
    while not answered.Test():
        time.sleep(_NAP)
    port, problem = ranks.bcast((port, problem))
    if problem:
        raise RuntimeError(f"rank {ranks.Get_rank()}: {problem}")
    # All are there, and the next thing that each of them does is to connect.
    ranks.Barrier()
    if connection is not None:
        with connection:
            connection.sendall(b"!")
    others = ranks.Connect(port)
    joined = others.Merge(high=True)
    others.Free()
    return joined


def _ask(folder: Path, count: int, vendor: str) -> tuple[socket.socket, str]:
    """Return the connection to the job at `folder`, and the port of MPI that it names."""
    if vendor == "Open MPI":
        raise RuntimeError(f"{settings.JOIN.name}: {_OPEN_MPI}")
    began = time.monotonic()
    limit, say = settings.START_SECONDS.read(), settings.STALL_SECONDS.read()
    words = f"for the job at {folder}, which lets others in when it calls elastic.admit()"
    with contextlib.ExitStack() as until_failed:
        connection: socket.socket | None = None
        where: dict[str, Any] = {}
        proof: Proof | None = None
        heard = b""
        said = _line({"ranks": count, "compared": launch_checks.compared()})
        while True:
            try:
                if connection is None:
                    where = _read_address(folder / _ADDRESS)
                    address = where["host"], where["port"]
                    connection = socket.create_connection(address, _PATIENCE)
                    until_failed.enter_context(connection)
                    proof, heard = Proof(connection, bytes.fromhex(where["secret"])), b""
                if proof is not None:
                    # The job looks at the end of a step only.
                    proof = None if proof.advance(said) else proof
                if proof is None:
                    connection.settimeout(_NAP)
                    heard += _hear(connection)
                else:
                    time.sleep(_NAP)
                    # A program that says nothing may have got the port of a job that was killed.
                    if _read_address(folder / _ADDRESS) != where:
                        raise ConnectionError("another job listens")
            except (OSError, ValueError, KeyError, TypeError):
                # It is not there yet, or has gone, and another may come.
                until_failed.close()
                connection = None
                time.sleep(_NAP)
            if connection is not None and heard.endswith(b"\n"):
                answer = json.loads(heard)
                if "refused" in answer:
                    raise RuntimeError(
                        f"{settings.JOIN.name}: the job at {folder} does not let this one in: "
                        f"{answer['refused']}"
                    )
                until_failed.pop_all()
                return connection, answer["port"]
            waited = time.monotonic() - began
            if waited > limit:
                raise RuntimeError(
                    f"{settings.JOIN.name}: this job has waited {waited:.0f} s {words}, and "
                    f"{settings.START_SECONDS.name} are over"
                )
            if waited > say:
                say *= 2
                print(f"mpiddp: waits {words}", file=sys.stderr, flush=True)


def _read_address(path: Path) -> dict[str, Any]:
    """Return what a job has written.

    Raises:
        OSError: it is not there, or is not this user's: who wrote it could pretend to be the job.
        ValueError: it is something else.
    """
    # Without blocking: it may be a pipe that somebody has put there.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is another user's, or no file")
        where: dict[str, Any] = json.loads(file.read(_LONGEST_LINE))
        return where


def _hear(connection: socket.socket) -> bytes:
    """Return what the other end says now, nothing if it is silent."""
    try:
        heard = connection.recv(_LONGEST_LINE)
    except TimeoutError:
        return b""
    if not heard:
        raise ConnectionError("the other end has closed the connection")
    return heard


def _line(what: dict[str, Any]) -> bytes:
    return json.dumps(what).encode() + b"\n"

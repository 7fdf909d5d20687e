"""Messages between rank 0 and the ranks that serve it: napping waits, tensors without copies.

A message is the size of its header, the header, and the bytes of each large tensor. The header
has the kind of the message, a dictionary of plain values, a pickle that may fail to load on the
receiver, and the description of its tensors.
"""

from __future__ import annotations

import array
import pickle
from dataclasses import dataclass, field
from typing import Any

import torch
from mpi4py import MPI

from mpiddp.collectives import packing, point_to_point
from mpiddp.data_parallel import pickling
from mpiddp.engine.engine import Engine
from mpiddp.engine.requests import Pending, Requests
from mpiddp.mpi import datatypes
from mpiddp.mpi.nodes import find_topology

__all__ = ["COMMAND", "Channel", "Message", "reply_tag"]

COMMAND = 1
# MPI promises tags up to 32767.
_REPLIES = 16384
# Looks at signals all the while.
_FOREVER = 1e9


def reply_tag(number: int) -> int:
    """Return the tag of the reply to a command. Not collective."""
    return COMMAND + 1 + number % _REPLIES


@dataclass
class Message:
    """What one rank says to another.

    Attributes:
        kind: such as "forward".
        fields: plain values.
        body: a pickle of the rest, in which the tensors are numbers.
        tensors: those of the body.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    tensors: list[torch.Tensor] = field(default_factory=list)

    def load(self) -> Any:
        """Return the object in the body. Not collective."""
        return pickling.unpack(self.body, self.tensors)


class Channel:
    """A process's end of the messages. Collective over `communicator`, which it owns.

    Args:
        communicator: a duplicate that nobody else uses.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        topology = find_topology(communicator)
        self.rank, self.size = topology.rank, topology.world_size
        self.local_rank = topology.local_rank
        # Whether a message was left in the middle, so that the others cannot be understood.
        self.broken = False
        self._communicator = communicator
        # Without a thread: it only takes part in waits.
        self._requests = Requests(Engine(threaded=False), crowded=topology.crowded)
        self._under_way: list[Pending] = []

    def start_sending(self, message: Message, to: int, tag: int) -> None:
        """Send; `finish_sending` waits. Not collective."""
        described = [pickling.dense(tensor) for tensor in message.tensors]
        head = (message.kind, message.fields, message.body, [meta for meta, _ in described])
        header = pickle.dumps(head, protocol=pickle.HIGHEST_PROTOCOL)
        self._send(array.array("q", [len(header)]), to, tag)
        self._send(header, to, tag)
        for _, sent in described:
            if sent is not None:
                for piece in point_to_point.byte_pieces(sent):
                    memory = datatypes.buffer_of(piece)
                    request = self._communicator.Isend(list(memory), to, tag)
                    self._keep(request, "MPI_Isend", (piece, sent))
        # What has arrived is let go; the wait for the rest is somebody else's.
        self._under_way = [pending for pending in self._under_way if not pending.test()]

    def finish_sending(self, seconds: float = _FOREVER) -> bool:
        """Wait until all that was sent has left; return whether it has in time. Not collective."""
        try:
            while self._under_way:
                if not self._under_way[0].wait(seconds):
                    return False
                self._under_way.pop(0)
        except BaseException:
            self.broken = True
            raise
        return True

    def receive(self, source: int, tag: int, device: torch.device | None = None) -> Message:
        """Wait for a message. Not collective.

        Args:
            source: the rank that sends it.
            tag: its tag.
            device: where tensors go that were on a GPU; None leaves them on the CPU.
        """
        try:
            size = array.array("q", [0])
            self._wait(self._communicator.Irecv([size, MPI.INT64_T], source, tag), size)
            header = bytearray(size[0])
            self._wait(self._communicator.Irecv([header, MPI.BYTE], source, tag), header)
            kind, fields, body, metas = pickle.loads(header)  # noqa: S301  # of a rank of this job
            tensors = []
            for meta in metas:
                tensor, memory = pickling.restore(meta)
                if meta.content is None:
                    for piece in point_to_point.byte_pieces(memory):
                        target = list(datatypes.buffer_of(piece))
                        self._wait(self._communicator.Irecv(target, source, tag), memory)
                on_gpu = device is not None and meta.device != "cpu"
                tensors.append(tensor.to(device) if on_gpu else tensor)
        except BaseException:
            self.broken = True
            raise
        return Message(kind, fields, body, tensors)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Broadcast bytes from rank 0. Collective over all ranks of the channel."""
        try:
            for piece in point_to_point.byte_pieces(packing.bytes_of(flat)):
                request = self._communicator.Ibcast(list(datatypes.buffer_of(piece)), 0)
                self._wait(request, flat)
        except BaseException:
            self.broken = True
            raise

    def _send(self, memory: Any, to: int, tag: int) -> None:
        view = memoryview(memory).cast("B")
        self._keep(self._communicator.Isend([view, MPI.BYTE], to, tag), "MPI_Isend", (view, memory))

    def _keep(self, request: MPI.Request, call: str, memory: object) -> None:
        self._under_way.append(Pending(self._requests, request, self._communicator, call, memory))

    def _wait(self, request: MPI.Request, memory: object) -> None:
        Pending(self._requests, request, self._communicator, "MPI_Test", memory).wait(_FOREVER)

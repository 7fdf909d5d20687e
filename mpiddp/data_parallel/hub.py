"""What a process has once for all its DataParallel modules: the channel, and the modules' numbers.

Note [The end of serving]
~~~~~~~~~~~~~~~~~~~~~~~~~
Rank 0 says "return" when its last open module is closed or collected, and "end" when it exits. A
"return" carries the number of modules that rank 0 has made by then: a serving rank that has made
more ignores it, since it was meant for an earlier `serve`. A rank that exits without `serve` waits
for "end" too, and answers each call with an error, so that rank 0 never waits for it in vain.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.mpi.abort import abort_job
from mpiddp.rendezvous import mpi_world

if TYPE_CHECKING:
    from mpiddp.data_parallel.channel import Channel, Message

__all__ = ["Hub", "get"]

# Seconds that rank 0's exit waits for the others to hear of it.
_PATIENCE = 30.0


class Hub:
    """The DataParallel modules of this process and their way to the other ranks. Collective.

    Args:
        by_value: the other ranks do not run the script: modules, and the classes that the script
            defines, are sent to them.
    """

    def __init__(self, by_value: bool) -> None:
        communicator = mpi_world.checked_communicator(None)
        from mpiddp.data_parallel.channel import Channel

        self.channel: Channel = Channel(communicator.Dup())
        self.rank, self.size = self.channel.rank, self.channel.size
        self.by_value = by_value
        # Whether a replica computes here now: a DataParallel within it calls its module plainly.
        self.computing = False
        # Receives what the others may still send.
        self.before_end: Callable[[], None] = lambda: None
        # Whether rank 0 has said that it is at its end.
        self.ended = False
        # Whether a rank that exits answers rank 0 all the same.
        self.end_is_watched = False
        self.made = 0
        self.modules: weakref.WeakValueDictionary[int, torch.nn.Module] = (
            weakref.WeakValueDictionary()
        )
        self._open: set[int] = set()
        self._process_id = os.getpid()
        # What must be said as soon as no other message is on its way.
        self._waiting: deque[Message] = deque()
        self._sending = 0

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the hub, and no forked child."""
        return self._process_id == os.getpid()

    def add(self, module: torch.nn.Module) -> int:
        """Give a DataParallel its number: the same one on all ranks. Not collective."""
        number = self.made
        self.made += 1
        self.modules[number] = module
        if self.rank == 0 and self.size > 1:
            self._open.add(number)
            weakref.finalize(module, self.close, number).atexit = False
        return number

    def close(self, number: int) -> None:
        """Let the others forget a module, and return if it was the last. Not collective.

        May be called by the garbage collector at any time.
        """
        if not self.is_here or number not in self._open or self.ended:
            return
        self._open.discard(number)
        if self.by_value:
            self._say("forget", number=number)
        elif not self._open:
            self._say("return", made=self.made)

    def end(self) -> None:
        """Tell the others that rank 0 is at its end. Not collective; of rank 0 only."""
        if not self.is_here or self.ended or self.size == 1:
            return
        self.ended = True
        if self.channel.broken:
            # The others wait for the rest of a message.
            abort_job(1)
        self.before_end()
        self._say("end")
        self.channel.finish_sending(_PATIENCE)

    def send(self, message: Message, to: int) -> None:
        """Send a command of rank 0. Not collective."""
        self._check()
        from mpiddp.data_parallel.channel import COMMAND

        self._sending += 1
        try:
            self.channel.start_sending(message, to, COMMAND)
        finally:
            self._sending -= 1
        self._say_waiting()

    def broadcast(self, message: Message, flat: torch.Tensor, runs: list[tuple[int, int]]) -> None:
        """Send a command to all, and parts of a flat buffer after it. Not collective by itself.

        The others take part when they receive the command.
        """
        self._check()
        for rank in range(1, self.size):
            self.send(message, rank)
        self.channel.finish_sending()
        self._sending += 1
        try:
            for begin, end in runs:
                self.channel.broadcast(flat[begin:end])
        finally:
            self._sending -= 1
        self._say_waiting()

    def _say(self, kind: str, **fields: Any) -> None:
        from mpiddp.data_parallel.channel import Message

        self._waiting.append(Message(kind, fields))
        self._say_waiting()

    def _say_waiting(self) -> None:
        while self._waiting and not self._sending and not self.channel.broken:
            message = self._waiting.popleft()
            for rank in range(1, self.size):
                self.send(message, rank)

    def _check(self) -> None:
        if self.channel.broken:
            raise RuntimeError(
                "DataParallel was interrupted within a message to another rank, so the others "
                "cannot be reached any more. Start the job again"
            )


_hub: Hub | None = None


def get(by_value: bool = False) -> Hub:
    """Return this process's hub. Collective over MPI.COMM_WORLD the first time.

    Args:
        by_value: for the first call: as for `Hub`.
    """
    global _hub
    if _hub is None:
        _hub = Hub(by_value)
        if _hub.size > 1 and _hub.rank == 0:
            atexit.register(_hub.end)
    return _hub

"""What rank 0 does in a forward pass: bring the replicas up to date, send, compute, collect."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from mpiddp.data_parallel import context, module_state, pickling
from mpiddp.data_parallel.channel import Message, reply_tag
from mpiddp.data_parallel.hub import Hub
from mpiddp.data_parallel.remote_call import RemoteCall

__all__ = ["Leader", "of_hub"]


class Leader:
    """Rank 0's commands and the replies to them. Not collective.

    Args:
        hub: this process's.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._number = 0
        # Calls whose graph is gone on rank 0, by the rank that still has it.
        self._released: dict[int, deque[int]] = {rank: deque() for rank in range(1, hub.size)}
        # Commands whose reply is still to come, and those of them that nobody will ask for.
        self._expected: dict[int, int] = {}
        self._abandoned: deque[int] = deque()
        hub.before_end = self._collect_all

    @property
    def by_value(self) -> bool:
        """Whether what the script defines is sent by value."""
        return self._hub.by_value

    def forward(
        self,
        number: int,
        module: torch.nn.Module,
        known: module_state.Known,
        inputs: Sequence[Any],
        kwargs: Sequence[dict[str, Any]],
        device: torch.device | None,
    ) -> list[Any]:
        """Return the output of each part of a batch: rank 0 computes the first one.

        Args:
            number: of the DataParallel.
            module: what it wraps.
            known: what the others have of it.
            inputs: positional arguments of each part, at most as many parts as ranks.
            kwargs: the named ones.
            device: where outputs go that were on a GPU.

        Raises:
            Exception: what a replica has raised; the one of the lowest rank.
        """
        self.check_process()
        calls: list[RemoteCall] = []
        replies: list[Message] = []
        try:
            if len(inputs) > 1:
                self._collect_abandoned()
                self._bring_up_to_date(number, module, known)
                fields = {"module": number, "context": context.current()}
                fields["random"] = context.random_states()
                parameters = [
                    tensor
                    for tensor in (*module.parameters(), *module.buffers())
                    if tensor.requires_grad
                ]
                for rank in range(1, len(inputs)):
                    calls.append(RemoteCall(self, rank, device))
                    calls[-1].start(fields, inputs[rank], kwargs[rank], parameters)
                self._hub.channel.finish_sending()
            first = inputs[0] if isinstance(inputs[0], list | tuple) else (inputs[0],)
            self._hub.computing = True
            try:
                outputs = [module(*first, **kwargs[0])]
            finally:
                self._hub.computing = False
            replies = [call.finish() for call in calls]
        except BaseException:
            for call in calls[len(replies) :]:
                self.abandon(call.number)
            raise
        return outputs + [call.result(reply) for call, reply in zip(calls, replies, strict=True)]

    def _bring_up_to_date(
        self, number: int, module: torch.nn.Module, known: module_state.Known
    ) -> None:
        # Those that make the module themselves need it only when it has become another one.
        make = self.by_value or known.structure is not None
        change, new = known.compare(module)
        try:
            if new and make:
                self._send_module(number, module)
            if change is not None:
                message = Message("state", {"module": number, "change": change})
                self._hub.broadcast(message, known.flat, change.runs)
        except BaseException:
            known.forget()
            raise

    def _send_module(self, number: int, module: torch.nn.Module) -> None:
        try:
            packed = pickling.pack_module(module, self.by_value)
        except Exception as error:
            raise type(error)(
                f"DataParallel cannot send {type(module).__name__} to the other ranks: {error}. "
                f"All that it consists of must be picklable; or let every rank construct it, and "
                f"call serve() there"
            ) from error
        fields = {"module": number, "path": list(sys.path)}
        for rank in range(1, self._hub.size):
            self._hub.send(Message("module", fields, packed.body, packed.tensors), rank)

    # For remote calls.

    def next_number(self) -> int:
        """Return the number of a new command."""
        self._number += 1
        return self._number

    def command(self, message: Message, rank: int, number: int) -> None:
        """Send a command that will be answered."""
        released = self._released[rank]
        message.fields["number"] = number
        message.fields["released"] = [released.popleft() for _ in range(len(released))]
        self._hub.send(message, rank)
        self._expected[number] = rank

    def reply(self, rank: int, number: int, device: torch.device | None) -> Message:
        """Wait for the reply to a command."""
        reply = self._hub.channel.receive(rank, reply_tag(number), device)
        self._expected.pop(number, None)
        return reply

    def release(self, rank: int, number: int) -> None:
        """Let a rank forget a call with its next command; the garbage collector may call this."""
        self._released[rank].append(number)

    def abandon(self, number: int) -> None:
        """Let a reply be thrown away that nobody waits for any more."""
        self._abandoned.append(number)

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child, which has no MPI."""
        if not self._hub.is_here:
            raise RuntimeError("DataParallel cannot be used in a forked process")

    def _collect_abandoned(self) -> None:
        while self._abandoned:
            number = self._abandoned.popleft()
            rank = self._expected.get(number)
            if rank is not None:
                self.reply(rank, number, None)

    def _collect_all(self) -> None:
        for number, rank in list(self._expected.items()):
            self.reply(rank, number, None)


_leaders: weakref.WeakKeyDictionary[Hub, Leader] = weakref.WeakKeyDictionary()


def of_hub(hub: Hub) -> Leader:
    """Return the leader of rank 0's hub. Not collective."""
    leader = _leaders.get(hub)
    if leader is None:
        leader = _leaders[hub] = Leader(hub)
    return leader

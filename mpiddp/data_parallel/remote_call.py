"""One replica's part of a forward pass on another rank, as a part of rank 0's autograd graph.

Note [Two nodes for a replica]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Autograd runs what was made later first. So the node that waits for a replica's gradients
(`_Entry`, whose inputs are the parameters and the replica's part of the batch) is made before
rank 0 computes its own part, and the node that sends gradients of outputs to the replica (`_Exit`)
is made after that. In backward all `_Exit` come first, then rank 0's own part, then all `_Entry`:
all ranks compute at the same time. A scalar connects the two. The parameters are inputs, so
autograd itself adds the replicas' gradients, and `torch.autograd.grad` works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from mpiddp.data_parallel import errors, pickling
from mpiddp.data_parallel.channel import Message

__all__ = ["Commands", "RemoteCall"]


class Commands(Protocol):
    """What a call needs of rank 0's leader."""

    @property
    def by_value(self) -> bool:
        """Whether what the script defines is sent by value."""

    def next_number(self) -> int:
        """Return the number of a new command."""

    def command(self, message: Message, rank: int, number: int) -> None:
        """Send a command that will be answered."""

    def reply(self, rank: int, number: int, device: torch.device | None) -> Message:
        """Wait for the reply to a command."""

    def release(self, rank: int, number: int) -> None:
        """Let a rank forget a call."""

    def abandon(self, number: int) -> None:
        """Let a reply be thrown away."""

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child."""


class RemoteCall:
    """A forward pass on another rank, and its backward passes. Of rank 0 only; not collective.

    The other rank keeps its graph for as long as this object lives, which is as long as rank 0's
    graph does.

    Args:
        leader: gives commands their numbers and receives replies.
        rank: of the replica.
        device: where its tensors go that are on a GPU there.
    """

    def __init__(self, leader: Commands, rank: int, device: torch.device | None) -> None:
        self.rank = rank
        self.number = leader.next_number()
        self._leader = leader
        self._device = device
        self._token: torch.Tensor | None = None
        self._outputs: list[torch.Tensor] = []
        self._backward: int | None = None
        self._sizes = 0

    def __del__(self) -> None:
        self._leader.release(self.rank, self.number)

    def start(
        self,
        fields: dict[str, Any],
        args: Any,
        kwargs: dict[str, Any],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """Send the replica its part of the batch.

        Args:
            fields: the module's number and the context.
            args: the positional arguments.
            kwargs: the named ones.
            parameters: those parameters and buffers of rank 0 that require a gradient.
        """
        if not isinstance(args, list | tuple):
            args = (args,)  # what a user's scatter() may return
        packed = pickling.pack((tuple(args), kwargs), self._leader.by_value)
        differentiable: list[int] = []
        if torch.is_grad_enabled():
            differentiable = [i for i, t in enumerate(packed.tensors) if t.requires_grad]
            leaves = [*parameters, *(packed.tensors[index] for index in differentiable)]
            self._sizes = len(leaves)
            if leaves:
                self._token = _Entry.apply(self, *leaves)  # type: ignore[no-untyped-call]
        message = Message(
            "forward",
            {**fields, "differentiable": differentiable},
            packed.body,
            packed.tensors,
        )
        self._leader.command(message, self.rank, self.number)

    def finish(self) -> Message:
        """Wait for what the replica says; the next is `result`."""
        return self._leader.reply(self.rank, self.number, self._device)

    def result(self, reply: Message) -> Any:
        """Return the replica's output, connected to the graph.

        Raises:
            Exception: what the replica has raised.
        """
        if reply.kind == "error":
            raise errors.rebuild(reply.fields)
        marked = reply.fields["differentiable"]
        if self._token is not None and marked:
            self._outputs = [reply.tensors[index] for index in marked]
            connected = _Exit.apply(self, self._token)  # type: ignore[no-untyped-call]
            for index, output in zip(marked, connected, strict=True):
                reply.tensors[index] = output
        self._token = None
        return reply.load()

    def take_outputs(self) -> tuple[torch.Tensor, ...]:
        """Return the differentiable outputs, and forget them."""
        outputs, self._outputs = tuple(self._outputs), []
        return outputs

    def send_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Let the replica begin its backward pass."""
        self._leader.check_process()
        if self._backward is not None:
            self._leader.abandon(self._backward)
        self._backward = self._leader.next_number()
        packed = pickling.pack(list(gradients))
        fields = {"call": self.number, "retain": _keeps_graph()}
        message = Message("backward", fields, packed.body, packed.tensors)
        self._leader.command(message, self.rank, self._backward)

    def receive_gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Wait for the gradients of the parameters and of the inputs.

        Raises:
            Exception: what the replica has raised.
        """
        assert self._backward is not None
        number, self._backward = self._backward, None
        reply = self._leader.reply(self.rank, number, self._device)
        if reply.kind == "error":
            raise errors.rebuild(reply.fields)
        gradients = tuple(reply.load())
        assert len(gradients) == self._sizes
        return gradients


class _Entry(torch.autograd.Function):
    """From the parameters and inputs of a replica to a scalar that stands for its pass."""

    @staticmethod
    def forward(ctx: Any, call: RemoteCall, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return torch.zeros((), device="cpu")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: torch.Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.call.receive_gradients()


class _Exit(torch.autograd.Function):
    """From that scalar to the outputs of the replica."""

    @staticmethod
    def forward(ctx: Any, call: RemoteCall, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.take_outputs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.call.send_gradients(gradients)
        return None, torch.zeros((), device="cpu")


def _keeps_graph() -> bool:
    """Return whether the backward pass under way keeps its graph for another one."""
    # Where torch does not tell, the graph is kept until rank 0's own is freed.
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())

"""What the other ranks do: wait for rank 0's commands, compute, and answer."""

from __future__ import annotations

import atexit
import importlib
import sys

import torch

from mpiddp.data_parallel import context, errors, pickling
from mpiddp.data_parallel.channel import COMMAND, Message, reply_tag
from mpiddp.data_parallel.hub import Hub
from mpiddp.data_parallel.module_state import Replica

__all__ = ["serve", "watch_end"]


def serve(hub: Hub) -> None:
    """Answer rank 0 until it says that this is the end. Not collective; not of rank 0.

    Where the script made the modules, it ends when rank 0 has closed all of them, too.
    """
    server = _Server(hub)
    with context.keep_random_state():
        try:
            server.run()
        finally:
            server.put_back()


def watch_end(hub: Hub) -> None:
    """Answer rank 0 with errors when this rank is at its end before rank 0. Not collective."""
    if not hub.end_is_watched:
        hub.end_is_watched = True
        atexit.register(_refuse, hub)


def _refuse(hub: Hub) -> None:
    if hub.is_here and not hub.ended and not hub.channel.broken:
        _Server(hub, refuses=True).run()


class _Server:
    """The replicas of this rank, and the passes whose graphs are kept.

    Args:
        hub: this process's.
        refuses: answer everything with an error.
    """

    def __init__(self, hub: Hub, refuses: bool = False) -> None:
        self._hub = hub
        self._refuses = refuses
        self._device = None
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            self._device = torch.device("cuda", hub.channel.local_rank % count)
        self._replicas: dict[int, Replica] = {}
        # Why a module cannot be used: the answer to the next call.
        self._broken: dict[int, Exception] = {}
        # By the number of the call: the outputs and the leaves of its graph.
        self._calls: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def run(self) -> None:
        """Answer until rank 0 lets this rank return."""
        while not self._hub.ended:
            message = self._hub.channel.receive(0, COMMAND, self._device)
            if message.kind == "end":
                self._hub.ended = True
            elif message.kind == "return":
                if message.fields["made"] >= self._hub.made and not self._refuses:
                    break
            elif message.kind == "forget":
                self._replicas.pop(message.fields["number"], None)
            elif message.kind == "module":
                self._take_module(message)
            elif message.kind == "state":
                self._take_state(message)
            else:
                self._answer(message)
        if self._hub.ended:
            self._hub.channel.finish_sending()

    def put_back(self) -> None:
        """Leave the script's modules as they were, with rank 0's parameters."""
        if not self._hub.by_value:
            for replica in self._replicas.values():
                replica.put_back()

    def _take_module(self, message: Message) -> None:
        number = message.fields["module"]
        self._broken.pop(number, None)
        self._replicas.pop(number, None)
        for folder in message.fields["path"]:
            if folder not in sys.path:
                sys.path.append(folder)
        importlib.invalidate_caches()
        try:
            self._replicas[number] = Replica(message.load())
        except Exception as error:
            self._broken[number] = error

    def _take_state(self, message: Message) -> None:
        number, change = message.fields["module"], message.fields["change"]
        try:
            replica = self._replica(number)
        except Exception as error:
            self._broken[number] = error
            replica = Replica(torch.nn.Module())
        if change.slots is not None:
            replica.resize(change.slots)
        for begin, end in change.runs:
            if end > replica.flat.numel():  # this rank's replica was lost
                replica.flat = torch.empty(end, dtype=torch.uint8, device="cpu")
            self._hub.channel.broadcast(replica.flat[begin:end])
        if number in self._broken:
            return
        try:
            if change.slots is not None:
                replica.check()
            replica.apply(change)
        except Exception as error:
            self._broken[number] = error

    def _replica(self, number: int) -> Replica:
        if number in self._broken:
            raise self._broken[number]
        if number not in self._replicas:
            wrapped = None if self._refuses else self._hub.modules.get(number)
            if self._refuses:
                raise RuntimeError(
                    "this rank is at the end of its script without having called serve()"
                )
            if wrapped is None:
                raise RuntimeError(
                    f"this rank has no DataParallel number {number}: every rank must construct "
                    f"the same ones, in the same order, before it calls serve()"
                )
            self._replicas[number] = Replica(wrapped.module)  # type: ignore[arg-type]
        return self._replicas[number]

    def _answer(self, message: Message) -> None:
        for released in message.fields["released"]:
            self._calls.pop(released, None)
        act = self._forward if message.kind == "forward" else self._backward
        try:
            reply = act(message)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            where = f"on rank {self._hub.rank}, in {message.kind} of its part of the batch"
            reply = Message("error", errors.describe(error, where))
        # Not waited for: rank 0 may send another command before it asks for this reply.
        self._hub.channel.start_sending(reply, 0, reply_tag(message.fields["number"]))

    def _forward(self, message: Message) -> Message:
        fields = message.fields
        replica = self._replica(fields["module"])
        replica.refresh()
        context.draw_from(fields["random"], self._hub.rank)
        leaves = [tensor for tensor in replica.tensors if tensor.requires_grad]
        with context.entered(fields["context"]):
            for index in fields["differentiable"]:
                leaf = message.tensors[index].requires_grad_()
                leaves.append(leaf)
                # Not the leaf itself: the module may write into its input.
                message.tensors[index] = leaf.clone()
            args, kwargs = message.load()
            self._hub.computing = True
            try:
                output = replica.module(*args, **kwargs)
            finally:
                self._hub.computing = False
            packed = pickling.pack(output)
        marked = []
        if fields["context"]["grad"]:
            marked = [i for i, tensor in enumerate(packed.tensors) if tensor.requires_grad]
        if marked:
            outputs = [packed.tensors[index] for index in marked]
            self._calls[fields["number"]] = outputs, leaves
        return Message("done", {"differentiable": marked}, packed.body, packed.tensors)

    def _backward(self, message: Message) -> Message:
        outputs, leaves = self._calls[message.fields["call"]]
        gradients: list[torch.Tensor | None] = message.load()
        used = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
        try:
            # Not autograd.grad, which reentrant checkpoints refuse.
            torch.autograd.backward(
                [output for output, _ in used],
                [gradient for _, gradient in used],
                retain_graph=message.fields["retain"],
            )
            found = [leaf.grad for leaf in leaves]
        finally:
            for leaf in leaves:
                leaf.grad = None
        packed = pickling.pack(found)
        return Message("done", {}, packed.body, packed.tensors)

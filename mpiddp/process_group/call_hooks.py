"""A user's functions that a group calls before and after each operation, and before an abort.

torch 2.14 brought them. torch calls those of other backends in its C++ dispatch, which our methods
pass by, so a group of mpiddp calls them itself. A group without hooks pays nothing for them: the
method that starts operations is replaced, on that one group, while it has some.

TORCH_DIST_NAN_CHECK=1 is such a hook. Buckets of gradients are shown to hooks as all-reduces.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work as TorchWork

from mpiddp.collectives import movement, point_to_point, reductions
from mpiddp.process_group.backend_properties import BackendProperties
from mpiddp.torch_internals.compiler import skip_compilation

__all__ = ["CallHooks"]

Tensors = Sequence[torch.Tensor]

_NAN_CHECK = "TORCH_DIST_NAN_CHECK"


class Call(NamedTuple):
    """One operation, as hooks see it."""

    name: str  # of torch's HookOpName
    inputs: Tensors = ()
    outputs: Tensors = ()
    root: int = -1


@skip_compilation
class CallHooks(BackendProperties):
    """A group whose operations may have hooks.

    Collective over `communicator`, and with the arguments of `OperationRunner`.
    """

    supports_abort_hooks = True
    supports_completion_hooks = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._before: dict[int, Callable[[Call, bool, int], None]] = {}
        self._after: dict[int, Callable[[Call, bool, int, TorchWork | None], None]] = {}
        self._aborting: dict[int, Callable[[], None]] = {}
        self._calls_seen = 0
        if os.environ.get(_NAN_CHECK) == "1":
            # Below those that torch's users may choose: it sees a tensor first.
            self._before[-(2**63)] = self._refuse_nan
            self._show_calls()

    # What torch's users call. None of it is collective.

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call ``hook(PreHookArgs)`` before each operation, in order of `hook_id`."""
        arguments = _from_torch("PreHookArgs")

        def before(call: Call, asynchronous: bool, number: int) -> None:
            told = arguments()
            told.name, told.async_op, told.op_id = _torch_name(call.name), asynchronous, number
            told.input_tensors, told.output_tensors = list(call.inputs), list(call.outputs)
            told.root = call.root
            hook(told)

        self._before[hook_id] = before
        self._show_calls()

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Forget the hook of this number, if there is one."""
        self._before.pop(hook_id, None)
        self._show_calls()

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call ``hook(PostHookArgs)`` when an operation is started, or over if synchronous.

        Its `work` is None for a bucket of gradients.
        """
        arguments = _from_torch("PostHookArgs")

        def after(call: Call, asynchronous: bool, number: int, work: TorchWork | None) -> None:
            told = arguments()
            told.name, told.async_op, told.op_id = _torch_name(call.name), asynchronous, number
            if work is not None:
                told.work = work
            hook(told)

        self._after[hook_id] = after
        self._show_calls()

    def unregister_post_hook(self, hook_id: int) -> None:
        """Forget the hook of this number, if there is one."""
        self._after.pop(hook_id, None)
        self._show_calls()

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call ``hook()`` where an operation's time is over, and before `abort` ends the job."""
        self._aborting[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Forget the hook of this number, if there is one."""
        self._aborting.pop(hook_id, None)

    # Where they are called.

    @property
    def shows_calls(self) -> bool:
        """Whether some hook wants to see operations."""
        return bool(self._before or self._after)

    def begin_call(self, call: Call, asynchronous: bool) -> int:
        """Call the hooks that come before; return the number of this operation."""
        number, self._calls_seen = self._calls_seen, self._calls_seen + 1
        for _, before in sorted(self._before.items()):
            before(call, asynchronous, number)
        return number

    def end_call(self, call: Call, asynchronous: bool, number: int, work: Any = None) -> None:
        """Call the hooks that come after."""
        for _, after in sorted(self._after.items()):
            after(call, asynchronous, number, work)

    def timed_out(
        self, name: str, seconds: float, number: int | None = None, gives_up: bool = True
    ) -> RuntimeError:
        """Return the error of an operation that waited in vain, and tell the abort hooks."""
        error = super().timed_out(name, seconds, number, gives_up)
        self._tell_of_abort()
        return error

    def abort(self) -> None:
        """End every rank of the job. Not collective."""
        self._tell_of_abort()
        super().abort()

    def _tell_of_abort(self) -> None:
        for _, hook in sorted(self._aborting.items()):
            try:
                hook()
            except Exception:  # what it was to tell of matters more
                traceback.print_exc(file=sys.stderr)

    def _show_calls(self) -> None:
        """Replace what starts operations while there are hooks."""
        if self.shows_calls:
            self.__dict__["_start"] = self._start_shown
        else:
            self.__dict__.pop("_start", None)

    def _start_shown(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        opts: Any = None,
        *others: Any,
        **settings: Any,
    ) -> TorchWork:
        call = _describe(name, function, arguments)
        asynchronous = opts is None or opts.asyncOp
        number = self.begin_call(call, asynchronous)
        work = type(self)._start(self, name, function, arguments, opts, *others, **settings)
        self.end_call(call, asynchronous, number, work)
        return work

    def _refuse_nan(self, call: Call, asynchronous: bool, number: int) -> None:
        """Raise if what this rank gives to an operation has a NaN in it."""
        if call.name in _FROM_ROOT and call.root != self.rank():
            return
        for tensor in call.inputs:
            if _has_nan(tensor):
                raise RuntimeError(
                    f"rank {self.world_ranks[self.rank()]}: NaN found in input tensor of "
                    f"{call.name.lower()} on process group {self.group_name or 'world'!r}: "
                    f"{tensor.dtype}, shape {tuple(tensor.shape)} (checked because of "
                    f"{_NAN_CHECK}=1)"
                )


# Of these only the root gives something.
_FROM_ROOT = ("BROADCAST", "SCATTER")


def _has_nan(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return _has_nan(tensor.coalesce().values())
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if tensor.element_size() == 1:
        tensor = tensor.float()  # 8-bit floats have no isnan
    return bool(tensor.isnan().any())


def _from_torch(name: str) -> Any:
    """Return a class of torch's hooks.

    Raises:
        RuntimeError: this torch has none.
    """
    if not hasattr(c10d, name):
        raise RuntimeError(
            f"torch {torch.__version__} has no hooks of process groups: 2.14 brought them"
        )
    return getattr(c10d, name)


def _torch_name(name: str) -> Any:
    """Return torch's HookOpName; torch 2.14 has one for all forms of a collective."""
    names = _from_torch("HookOpName")
    while not hasattr(names, name):
        name = name.rpartition("_")[0]
    return getattr(names, name)


def _flat(lists: Iterable[Tensors]) -> list[torch.Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def _one_or_several(one: str, several: str) -> Callable[..., Call]:
    def describe(outputs: Tensors, inputs: Tensors, *_: object) -> Call:
        return Call(one if len(inputs) == 1 else several, inputs, outputs)

    return describe


# How hooks see the functions of `mpiddp.collectives`, from their arguments.
_DESCRIPTIONS: dict[Callable[..., Any], Callable[..., Call]] = {
    reductions.all_reduce: lambda tensors, op: Call("ALLREDUCE", tensors),
    reductions.all_reduce_together: lambda tensors, op: Call("ALLREDUCE_COALESCED", tensors),
    reductions.reduce: lambda tensors, op, root: Call("REDUCE", tensors, (), root),
    reductions.reduce_scatter: lambda outputs, inputs, op: Call(
        "REDUCE_SCATTER", _flat(inputs), outputs
    ),
    reductions.reduce_scatter_single: _one_or_several(
        "REDUCE_SCATTER_BASE", "REDUCE_SCATTER_TENSOR_COALESCED"
    ),
    movement.broadcast: lambda tensors, root: Call("BROADCAST", tensors, (), root),
    movement.all_gather: lambda outputs, inputs: Call("ALLGATHER", inputs, _flat(outputs)),
    movement.all_gather_single: _one_or_several(
        "ALLGATHER_BASE", "ALLGATHER_INTO_TENSOR_COALESCED"
    ),
    movement.gather: lambda outputs, inputs, root: Call("GATHER", inputs, _flat(outputs), root),
    movement.gather_single: lambda output, tensor, root: Call("GATHER", [tensor], [output], root),
    movement.scatter: lambda outputs, inputs, root: Call("SCATTER", _flat(inputs), outputs, root),
    movement.all_to_all: lambda outputs, inputs: Call("ALLTOALL", inputs, outputs),
    movement.all_to_all_single: lambda output, tensor, *splits: Call(
        "ALLTOALL_BASE", [tensor], [output]
    ),
    point_to_point.send: lambda tensors, to, tag: Call("SEND", tensors, (), to),
    point_to_point.receive: lambda tensors, source, tag: Call("RECV", (), tensors, source),
}
# Those that have a function in common with others.
_BY_NAME = {"all_reduce_coalesced": "ALLREDUCE_COALESCED", "barrier": "BARRIER"}


def _describe(name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Call:
    describe = _DESCRIPTIONS.get(function)
    if describe is None:  # a barrier; or a sum of sparse tensors, which is over
        return Call(_BY_NAME.get(name, "ALLREDUCE"), _flat(arguments))
    call = describe(*arguments)
    return call._replace(name=_BY_NAME.get(name, call.name))

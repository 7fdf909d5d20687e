"""Show operations to torch's dispatch modes and tensor subclasses, as torch's dispatcher would.

torch calls a process group in C++ through operators such as c10d.allreduce_, and a
TorchDispatchMode (CommDebugMode, for one) or a subclass (DTensor) sees these. This group's methods
are called past the dispatcher. So while a mode is active, or for a tensor of a subclass, the
operator is shown here, and calling it runs the operation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack
from torch._ops import OpOverload
from torch.utils._python_dispatch import _pop_mode_temporarily

from mpiddp.collectives import movement, point_to_point, reductions
from mpiddp.process_group.work import COMPLETED

if TYPE_CHECKING:
    from mpiddp.collectives.operation import Operation
    from mpiddp.process_group.operation_call import OperationCall

__all__ = ["is_seen", "show"]

# Those whose memory is what they show.
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

# For each operation its operator, and where the operator's arguments come from: the index of an
# argument of the operation, or of the first of a list; or what the names below say.
_GROUP, _ASYNC, _TIMEOUT = "group", "async", "timeout"
_NONE, _ZERO, _NOTHING, _TENSOR = "none", "zero", "nothing", "tensor"
_FIRST = {0: "first of 0", 1: "first of 1"}
_HOW = (_ASYNC, _TIMEOUT)
_OPERATORS: dict[tuple[str, Callable[..., Operation]], tuple[str, tuple[object, ...]]] = {
    ("all_reduce", reductions.all_reduce): ("allreduce_", (0, _GROUP, 1, _NONE, *_HOW)),
    ("all_reduce_coalesced", reductions.all_reduce): (
        "allreduce_coalesced_",
        (0, _GROUP, 1, *_HOW),
    ),
    ("all_reduce_coalesced", reductions.all_reduce_together): (
        "allreduce_coalesced_",
        (0, _GROUP, 1, *_HOW),
    ),
    ("reduce", reductions.reduce): ("reduce_", (0, _GROUP, 1, 2, _ZERO, *_HOW)),
    ("reduce_scatter", reductions.reduce_scatter): ("reduce_scatter_", (0, 1, _GROUP, 2, *_HOW)),
    ("reduce_scatter", reductions.reduce_scatter_single): (
        "_reduce_scatter_base_",
        (_FIRST[0], _FIRST[1], _GROUP, 2, *_HOW),
    ),
    ("broadcast", movement.broadcast): ("broadcast_", (0, _GROUP, 1, _ZERO, *_HOW)),
    ("all_gather", movement.all_gather): ("allgather_", (0, 1, _GROUP, *_HOW)),
    ("all_gather", movement.all_gather_single): (
        "_allgather_base_",
        (_FIRST[0], _FIRST[1], _GROUP, *_HOW),
    ),
    ("gather", movement.gather): ("gather_", (0, 1, _GROUP, 2, *_HOW)),
    ("scatter", movement.scatter): ("scatter_", (0, 1, _GROUP, 2, *_HOW)),
    ("all_to_all", movement.all_to_all): ("alltoall_", (0, 1, _GROUP, *_HOW)),
    ("all_to_all", movement.all_to_all_single): ("alltoall_base_", (0, 1, _GROUP, 2, 3, *_HOW)),
    ("barrier", movement.barrier): ("barrier", (_TENSOR, _GROUP, _NOTHING, *_HOW)),
    ("send", point_to_point.send): ("send", (0, _GROUP, 1, 2)),
    ("recv", point_to_point.receive): ("recv_", (0, _GROUP, 1, 2)),
    ("recvAnySource", point_to_point.receive): ("recv_any_source_", (0, _GROUP, 2)),
}
# For several tensors at once.
_COALESCED = {
    "_allgather_base_": ("allgather_into_tensor_coalesced_", (0, 1, _GROUP, _ASYNC)),
    "_reduce_scatter_base_": ("reduce_scatter_tensor_coalesced_", (0, 1, _GROUP, 2, *_HOW)),
}


def is_seen(tensors: Iterable[torch.Tensor], name: str, function: Callable[..., Operation]) -> bool:
    """Return whether a mode, or a class of one of the tensors, is to see an operation."""
    if not (_len_torch_dispatch_stack() or any(map(_has_own_dispatch, tensors))):
        return False
    return (name, function) in _OPERATORS


def show(start: Callable[[OperationCall], dist.Work], group: Any, call: OperationCall) -> dist.Work:
    """Show an operation to the innermost mode, or to a class of tensors; return its Work.

    Args:
        start: starts an operation of the group.
        group: the process group.
        call: of the operation.
    """
    name, arguments, opts = call.name, call.arguments, call.opts
    operator, places = _OPERATORS[name, call.function]
    if operator in _COALESCED and len(arguments[0]) != 1:
        operator, places = _COALESCED[operator]
    works: list[dist.Work] = []

    def begin(*given: Any) -> Any:
        changed = _changed(arguments, places, given)
        same = dict(zip(map(id, _flat(arguments)), _flat(changed), strict=False))
        compared = [same.get(id(tensor), tensor) for tensor in call.tensors]
        works.append(start(call._replace(arguments=changed, tensors=compared)))
        return given[0], works[-1]

    shown = _Operator.of(getattr(torch.ops.c10d, operator).default, begin)
    given = tuple(_argument(place, group, arguments, opts) for place in places)
    # As the dispatcher does, which leaves out what the operator has by default.
    for described in reversed(shown._schema.arguments[: len(given)]):
        if not described.has_default_value() or given[-1] != described.default_value:
            break
        given = given[:-1]
    types = tuple({type(each) for each in _flat(given)})
    if _len_torch_dispatch_stack():
        with _pop_mode_temporarily() as mode:
            mode.__torch_dispatch__(shown, types, given, {})
    else:
        own = next(each for each in _flat(given) if _has_own_dispatch(each))
        tensor = sys.modules.get("torch.distributed.tensor")
        if tensor is not None and isinstance(own, tensor.DTensor):
            raise NotImplementedError(  # as Gloo does: torch has no strategy for it
                f"Operator {shown} does not have a sharding strategy registered: {name} takes "
                f"plain tensors. Give it the local one, `DTensor.to_local()`, or let torch move "
                f"the data, `DTensor.redistribute()`"
            )
        type(own).__torch_dispatch__(shown, types, given, {})
    return works[-1] if works else COMPLETED


class _Operator(OpOverload):
    """An operator of torch that does something else when it is called."""

    _call: Callable[..., Any]

    @classmethod
    def of(cls, operator: OpOverload, call: Callable[..., Any]) -> _Operator:
        made = object.__new__(cls)
        made.__dict__.update(operator.__dict__)
        made._call = call
        return made

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpOverload) and other._op is self._op

    def __hash__(self) -> int:
        return hash(self._op)


def _has_own_dispatch(tensor: torch.Tensor) -> bool:
    if type(tensor) in _PLAIN:
        return False
    # Looked up anew, the method of a class in C is another object each time.
    return bool(type(tensor).__torch_dispatch__ != torch.Tensor.__torch_dispatch__)


def _argument(place: object, group: Any, arguments: tuple[Any, ...], opts: Any) -> Any:
    if isinstance(place, int):
        return arguments[place]
    if place in _FIRST.values():
        return arguments[int(str(place)[-1])][0]
    if place == _TENSOR:
        return torch.empty(1, device="cpu")  # torch finds the device by it
    timeout = getattr(opts, "timeout", None) or timedelta(0)
    return {
        _GROUP: group,
        _NONE: None,
        _ZERO: 0,
        _ASYNC: bool(getattr(opts, "asyncOp", True)),
        _TIMEOUT: int(timeout.total_seconds() * 1000) if timeout > timedelta(0) else -1,
        _NOTHING: [],
    }[str(place)]


def _changed(
    arguments: tuple[Any, ...], places: tuple[object, ...], given: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return an operation's arguments, from those that its operator was called with."""
    changed = list(arguments)
    for place, value in zip(places, given, strict=False):
        if isinstance(place, int):
            changed[place] = value
        elif place in _FIRST.values():
            changed[int(str(place)[-1])] = [value]
    return tuple(changed)


def _flat(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _flat(value)

"""Let all ranks start from the parameters, and from the optimizer's state, of one of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mpiddp import shown_progress
from mpiddp.ddp.buffer_broadcast import broadcast_in_buffers
from mpiddp.horovod.process_sets import ProcessSet, global_process_set, registered, table
from mpiddp.process_group.group import ProcessGroup
from mpiddp.reducer import model_check

_MESSAGE_BYTES = 25 << 20


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Make tensors equal to those of one rank, in place.

    Collective over the process set; other ranks return at once.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``: a
            mapping of names to tensors, or tensors, or pairs of both. Entries that are None are
            left out.
        root_rank: whose tensors all ranks get, as `rank` counts.
        process_set: the ranks.

    Raises:
        ValueError: `params` is something else, or `root_rank` is not in the process set.
        RuntimeError: the ranks give different tensors; the error names the first that differ.
    """
    group = registered(process_set).group
    if group is None:
        return
    root = _rank_in_group(root_rank, process_set)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _pairs(params):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"broadcast_parameters needs tensors; {name} is {type(tensor)}")
        tensors[name] = tensor
    _require_equal(group, "different tensors", model_check.describe_tensors(tensors))
    _broadcast("broadcast of parameters", list(tensors.values()), root, group)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Make an optimizer's state and settings equal to those of one rank.

    Collective over the process set; other ranks return at once. Learning rates and other settings
    of the parameter groups, and all state (momentum, steps and so on) become the root's, with its
    types and dtypes. A rank without state gets it, and state that the root lacks goes. Parameters
    and gradients stay as they are.

    Args:
        optimizer: of torch, or a `DistributedOptimizer`.
        root_rank: whose state all ranks get, as `rank` counts.
        model: not needed; some versions of Horovod take it.
        process_set: the ranks.

    Raises:
        ValueError: `optimizer` is an LBFGS, as in Horovod, or `root_rank` is not in the process
            set.
        RuntimeError: the ranks' optimizers have different parameters or classes, or the root's
            state cannot be pickled; raised on all ranks.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of torch.optim.LBFGS cannot be broadcast")
    group = registered(process_set).group
    if group is None:
        return
    root = _rank_in_group(root_rank, process_set)
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    named = {
        f"parameter {j} of group {i}": parameter
        for i, each in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(each["params"])
    }
    _require_equal(
        group,
        "the state of different optimizers",
        {"the class": type(optimizer).__name__, **model_check.describe_tensors(named)},
    )
    tensors: list[torch.Tensor] = []
    content: Any = None
    if group.rank() == root:
        content = _packed(optimizer, parameters, tensors)
    groups, states, others = _broadcast_object(content, root, group)

    def unpack(value: Any, present: Any, device: torch.device) -> Any:
        return _unpacked(value, present, device, tensors)

    if group.rank() != root:
        for each, settings in zip(optimizer.param_groups, groups, strict=True):
            device = each["params"][0].device if each["params"] else torch.device("cpu")
            for name in [name for name in each if name not in settings and name != "params"]:
                del each[name]
            for name, value in settings.items():
                each[name] = unpack(value, each.get(name), device)
        old = dict(optimizer.state)
        optimizer.state.clear()
        for index, value in states.items():
            parameter = parameters[index]
            optimizer.state[parameter] = unpack(value, old.get(parameter), parameter.device)
        for key, value in others.items():
            optimizer.state[key] = unpack(value, old.get(key), torch.device("cpu"))
    _broadcast("broadcast of the optimizer's state", tensors, root, group)


@dataclass(frozen=True)
class _Tensor:
    """A tensor within what is pickled; its elements follow."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


def _packed(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    tensors: list[torch.Tensor],
) -> tuple[list[Any], dict[int, Any], dict[Any, Any]]:
    """Return settings, state by number of parameter, and other state, without tensors.

    Args:
        optimizer: the root's.
        parameters: its parameters.
        tensors: the tensors are added to this list, in the order of `_unpacked`.
    """

    def pack(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return _Tensor(tuple(value.shape), value.dtype, value.device.type == "cpu")
        return _rebuilt(value, pack)

    groups = [
        {name: pack(value) for name, value in each.items() if name != "params"}
        for each in optimizer.param_groups
    ]
    numbers = {parameter: index for index, parameter in enumerate(parameters)}
    states = {numbers[p]: pack(state) for p, state in optimizer.state.items() if p in numbers}
    others = {key: pack(state) for key, state in optimizer.state.items() if key not in numbers}
    return groups, states, others


def _unpacked(value: Any, present: Any, device: torch.device, tensors: list[torch.Tensor]) -> Any:
    """Return what `_packed` has made `value` of, with tensors whose elements are yet to come.

    Args:
        value: packed.
        present: what this rank has there; its tensors are used again where they fit.
        device: of the parameter.
        tensors: the tensors are added to this list.
    """
    if isinstance(value, _Tensor):
        fits = (
            isinstance(present, torch.Tensor)
            and tuple(present.shape) == value.shape
            and present.dtype is value.dtype
            and not present.requires_grad
            and present.is_contiguous()
        )
        if not fits:
            where = "cpu" if value.on_cpu else device
            present = torch.empty(value.shape, dtype=value.dtype, device=where)
        tensors.append(present)
        return present

    def unpack(inner: Any, name: Any) -> Any:
        known = present.get(name) if isinstance(present, dict) else None
        return _unpacked(inner, known, device, tensors)

    if isinstance(value, dict):
        return {name: unpack(inner, name) for name, inner in value.items()}
    return _rebuilt(value, lambda inner: unpack(inner, None))


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a dict, list or tuple with its values changed, and anything else as it is."""
    if isinstance(value, dict):
        return {name: change(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(inner) for inner in value)
    return value


def _broadcast_object(value: Any, root: int, group: ProcessGroup) -> Any:
    """Return the root's value on all ranks; an error there is one on all. Collective."""
    message: list[Any] = [None]
    if group.rank() == root:
        try:
            message = [(True, pickle.dumps(value))]
        except Exception as error:  # whatever the classes in it raise
            message = [(False, f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(message, group=group, group_src=root, device=torch.device("cpu"))
    fine, content = message[0]
    if not fine:
        raise RuntimeError(
            f"rank {group.me}: the state of the root's optimizer cannot be pickled: {content}"
        )
    return pickle.loads(content)  # noqa: S301  # of a rank of this job


def _broadcast(what: str, tensors: Sequence[torch.Tensor], root: int, group: ProcessGroup) -> None:
    """Make tensors equal to those of rank `root` of the group. Collective."""
    if group.size() == 1 or not tensors:
        return
    with torch.no_grad():
        plain = [tensor.detach() for tensor in tensors]
        with shown_progress.shown(
            what,
            lambda: sum(tensor.nbytes for tensor in plain),
            shows=group.world_ranks[group.rank()] == 0,
        ):
            if root == 0 and group.broadcast_state(plain):
                return
            broadcast_in_buffers(group, plain, _MESSAGE_BYTES, root)


def _require_equal(group: ProcessGroup, what: str, description: Mapping[str, str]) -> None:
    """Raise on all ranks unless they give the same description. Collective."""
    found = model_check.differences(group, description)
    if found:
        raise RuntimeError(
            f"rank {group.me}: the ranks broadcast {what}: {'; '.join(found)}. Call it on all "
            f"ranks with the same model"
        )


def _rank_in_group(root_rank: int, process_set: ProcessSet) -> int:
    ranks = registered(process_set).ranks
    if root_rank not in ranks:
        raise ValueError(
            f"rank {table().rank}: root_rank {root_rank} is not in the process set of {ranks}"
        )
    return ranks.index(root_rank)


def _pairs(params: Any) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        # Mappings of equal keys may be in different order.
        return sorted(params.items())
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(
            f"broadcast_parameters needs a state_dict, parameters or named parameters, not "
            f"{type(params)}"
        )
    return [
        entry if isinstance(entry, tuple) else (f"number {number}", entry)
        for number, entry in enumerate(params)
    ]

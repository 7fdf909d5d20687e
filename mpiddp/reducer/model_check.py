"""Compare what must be equal on all ranks; the errors name the ranks that differ."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllgatherOptions

from mpiddp.reducer.errors import _SHOWN, ranks_of

if TYPE_CHECKING:
    from mpiddp.process_group.group import ProcessGroup
    from mpiddp.reducer.state import ReducerState


class ParameterNames:
    """What to call the parameters of a module in errors. Not collective.

    Args:
        parameters: those that are trained.
        names: their names as torch's wrapper knows them, by index.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], names: Mapping[int, str]) -> None:
        self._shapes = [tuple(parameter.shape) for parameter in parameters]
        self._names = names

    def name(self, index: int) -> str:
        """Return the name that `named_parameters` of the module gives."""
        # torch joins module and parameter names by a dot even where the module has no name.
        return self._names[index].removeprefix(".")

    def describe(self, index: int) -> str:
        """Return words such as "parameter 'weight' of shape (3, 4)"."""
        return f"parameter {self.name(index)!r} of shape {self._shapes[index]}"


def describe_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return by name what must be equal on all ranks: shape, dtype, strides, which GPU if any.

    Not collective.
    """
    # By number: each rank may have GPUs of its own.
    devices = list(dict.fromkeys(t.device for t in tensors.values() if t.device.type != "cpu"))
    return {
        name: (
            f"shape {tuple(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}"
            if tensor.layout is torch.strided
            else f"shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.layout}"
        )
        + (f", on GPU number {devices.index(tensor.device)}" if tensor.device in devices else "")
        for name, tensor in tensors.items()
    }


def verify_equal_models(
    process_group: ProcessGroup,
    description: Mapping[str, str],
    complaint: str = "construct different models",
) -> None:
    """Raise on all ranks unless every rank gives the same description in the same order.

    Collective, see `differences`.

    Args:
        process_group: the ranks to compare.
        description: what to compare, by the name that the error is to give.
        complaint: what the ranks have done if these differ.

    Raises:
        RuntimeError: they differ; the error names the first differences and their ranks.
    """
    found = differences(process_group, description)
    if found:
        raise RuntimeError(
            f"rank {process_group.me}: the ranks {complaint}, so their gradients cannot be "
            f"averaged. " + "; ".join(found)
        )


def differences(process_group: ProcessGroup, description: Mapping[str, str]) -> list[str]:
    """Return how the ranks' descriptions differ, in words; the same on all ranks.

    Collective. Only digests travel while all is well.

    Args:
        process_group: the ranks to compare.
        description: what to compare, by the name that the words are to give.

    Returns:
        The first differences and their ranks; nothing if there are none.
    """
    items = list(description.items())
    digest = hashlib.sha256(pickle.dumps(items)).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    digests = torch.empty(process_group.size() * own.numel(), dtype=torch.uint8, device="cpu")
    at_once = AllgatherOptions()
    at_once.asyncOp = False
    # Not torch.distributed's function: it has another name before torch 2.13.
    process_group.all_gather_single(digests, own, at_once)
    if (digests.view(process_group.size(), -1) == own).all():
        # The same on this rank as on all others, hence the same on all.
        return []
    return _differences(process_group, process_group.allgather_objects(items))[:_SHOWN]


def verify_unchanged(reducer: ReducerState) -> None:
    """Raise on all ranks if parameters are no longer alike when buckets are laid out again.

    Collective.

    Raises:
        RuntimeError: the error names the first parameters that differ, and their ranks.
    """
    verify_equal_models(
        reducer.process_group,
        describe_tensors(
            {
                reducer.describe_parameter(index): parameter
                for index, parameter in enumerate(reducer.parameters)
            }
        ),
        "have changed parameters in different ways since the module was wrapped",
    )


def _differences(group: ProcessGroup, everyone: Sequence[Sequence[tuple[str, str]]]) -> list[str]:
    """Name what differs from the first rank, with the ranks on which it does."""
    reference, first = dict(everyone[0]), ranks_of(group, [0])
    found: dict[str, list[int]] = {}
    for rank, items in enumerate(everyone):
        own = dict(items)
        for name in [*reference, *(name for name in own if name not in reference)]:
            ours, theirs = reference.get(name, "absent"), own.get(name, "absent")
            if ours != theirs:
                found.setdefault(f"{name} is {theirs} but {ours} on {first}", []).append(rank)
        if own == reference and list(own) != list(reference):
            found.setdefault("parameters are registered in another order", []).append(rank)
    return [f"on {ranks_of(group, ranks)} {what}" for what, ranks in found.items()]


def describe_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return constructor arguments in the form that verify_equal_models compares.

    Not collective.
    """
    return {f"argument {name}": repr(value) for name, value in settings.items()}

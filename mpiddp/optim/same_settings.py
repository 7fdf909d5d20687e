"""What a step uses, compared between all ranks: settings, edits, and which gradients there are.

Note [Where settings are compared]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each rank steps its part of the parameters for its whole node, and each node for itself. So settings
that differ, as a learning rate that follows a rank's own loss, would give parts of one model other
rates, and nothing would show it. Within a node a digest goes with the number that each rank brings
to the meeting before a step, when nothing is changed yet. Between nodes digests are reduced while
the ranks step, and looked at before the step ends. Words travel only if digests differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import ReduceOp

from mpiddp.reducer import model_check

if TYPE_CHECKING:
    from mpiddp.ddp.shared_parameters import SharedParameters

__all__ = ["Comparison", "compare_groups", "describe_group", "settings_of"]

# So many bits that a double keeps them, beside the few that a step tells otherwise.
_DIGEST_BYTES = 6
# Elements of a tensor that is a setting, and characters of names.
_FEW, _SHOWN = 64, 200


def describe_group(number: int, group: Mapping[str, Any]) -> dict[str, str]:
    """Return what a step reads of a param_group, in words, by name. Not collective."""
    return {
        f"param_groups[{number}][{key!r}]": _text(group[key]) for key in sorted(settings_of(group))
    }


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a param_group has besides its parameters. Not collective."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _text(value: Any) -> str:
    """Return words for a value, which are equal on two ranks if it is."""
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return repr(value.tolist()) if value.numel() <= _FEW else f"a tensor of {value.numel()}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    # The words of other objects may contain their address.
    return f"a {type(value).__name__}"


def _digest(text: str) -> int:
    found = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=_DIGEST_BYTES)
    return int.from_bytes(found.digest(), "little")


class Comparison:
    """What this rank steps with, compared with the others.

    Collective, and so is `finish`.

    Args:
        shared: the parameters.
        description: what the step uses, by name.
    """

    def __init__(self, shared: SharedParameters, description: Mapping[str, str]) -> None:
        self._group = shared.group
        self._description = description
        self.number = _digest("\n".join(f"{name}={text}" for name, text in description.items()))
        self._work = None
        if shared.across_nodes:
            # The largest of both is one number only if there is one.
            self._largest = torch.tensor(
                [self.number, -self.number], dtype=torch.int64, device="cpu"
            )
            options = AllreduceOptions()
            options.reduceOp = ReduceOp(ReduceOp.MAX)
            self._work = self._group.allreduce([self._largest], options)

    def explain(self) -> str:
        """Return how the ranks differ, in words. Collective: all of them know that they do."""
        found = model_check.differences(self._group, self._description)
        return _complaint(self._group.me, "step", found)

    def finish(self) -> None:
        """Raise on all ranks if those of other nodes step with something else. Collective.

        Raises:
            RuntimeError: they do.
        """
        if self._work is None:
            return
        self._work.wait()
        largest, smallest = self._largest.tolist()
        if largest != -smallest:
            raise RuntimeError(
                f"{self.explain()}. Some nodes have made this step: start again from the last "
                f"checkpoint"
            )


def compare_groups(
    shared: SharedParameters, made: Mapping[str, Any], groups: Iterable[tuple[int, dict[str, Any]]]
) -> None:
    """Raise on all ranks unless they make the same optimizer, or add the same group. Collective.

    Args:
        shared: the parameters.
        made: what else must be the same, by name.
        groups: numbers of param_groups, and these.

    Raises:
        RuntimeError: they do not; the error names the first differences and their ranks.
    """
    description = {name: _text(value) for name, value in made.items()}
    for number, group in groups:
        names = ", ".join(shared.name_of(parameter) for parameter in group["params"])
        shown = names if len(names) <= _SHOWN else f"{names[:_SHOWN]}... ({_digest(names):x})"
        description[f"param_groups[{number}]['params']"] = (
            f"{len(group['params'])} parameters: {shown}"
        )
        description |= describe_group(number, group)
    found = model_check.differences(shared.group, description)
    if found:
        raise RuntimeError(_complaint(shared.group.me, "make a NodeOptimizer", found))


def _complaint(rank: str, what: str, found: Iterable[str]) -> str:
    return (
        f"rank {rank}: the ranks {what} with different settings, and each of them steps a part of "
        f"one model: {'; '.join(found)}. All ranks must have the same, as a learning rate that "
        f"follows a loss averaged over all of them"
    )

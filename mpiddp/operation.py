"""What a rank says about a collective that it has entered: a tuple, made into words when asked.

The tuple holds no tensor, whose memory would live as long as it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

__all__ = ["Operation", "describe", "operation", "ranks_in_words"]

# The name as torch.distributed's function has it; what it does, such as "SUM" or "root 1"; dtype
# and shape of the first tensor, and the number of tensors.
Operation: TypeAlias = tuple[str, str, torch.dtype | None, Sequence[int], int]


def operation(name: str, detail: str, tensors: Sequence[torch.Tensor]) -> Operation:
    """Return what `describe` makes words of. Not collective."""
    if not tensors:
        return name, detail, None, (), 0
    first = tensors[0]
    return name, detail, first.dtype, first.shape, len(tensors)


def describe(entered: Operation) -> str:
    """Return words such as "all_reduce(SUM) of float32 (3, 4)". Not collective."""
    name, detail, dtype, shape, count = entered
    text = f"{name}({detail})" if detail else name
    if dtype is not None:
        text += f" of {str(dtype).removeprefix('torch.')} {tuple(shape)}"
    if count > 1:
        text += f" and {count - 1} more"
    return text


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return "rank 3", "ranks 2 and 5", or "ranks 0 to 3 and 7". Not collective."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"rank{'s' * (len(ordered) > 1)} {text}"

"""Record a collective cheaply; format it only for errors.

The tuple holds no tensor: it would keep the tensor's memory alive.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

__all__ = [
    "Call",
    "call_of",
    "describe",
    "describe_call",
    "describe_dtype",
    "is_of_a_library",
    "place",
    "ranks_in_words",
]

# Files with these in their names are not the user's.
_LIBRARIES = ("/torch/", "/mpiddp/", "/mpi4py/", "/contextlib.py", "/threading.py", "<frozen")

# The name of torch.distributed's function; a ReduceOp, a root, a tuple of these, or None; dtype and
# shape of the first tensor; the number of tensors.
Call: TypeAlias = tuple[str, object, torch.dtype | None, Sequence[int], int]


def call_of(name: str, detail: object, tensors: Sequence[torch.Tensor]) -> Call:
    """Return the record that `describe` formats. Not collective."""
    if not tensors:
        return name, detail, None, (), 0
    first = tensors[0]
    return name, detail, first.dtype, first.shape, len(tensors)


def describe(call: Call) -> str:
    """Return words such as "all_reduce(SUM) of float32 (3, 4)". Not collective."""
    name, detail, dtype, shape, count = call
    text = describe_call(name, detail)
    if dtype is not None:
        text += f" of {describe_dtype(dtype)} {tuple(shape)}"
    if count > 1:
        text += f" and {count - 1} more"
    return text


def describe_call(name: str, detail: object) -> str:
    """Return words such as "all_reduce(SUM)" or "reduce(SUM, root 1)". Not collective."""
    if detail is None:
        return name
    details = detail if isinstance(detail, tuple) else (detail,)
    return f"{name}({', '.join(map(_describe_detail, details))})"


def _describe_detail(detail: object) -> str:
    if isinstance(detail, int):
        return f"root {detail}"
    kind = getattr(detail, "op", detail)
    return str(getattr(kind, "name", kind))


def describe_dtype(dtype: torch.dtype) -> str:
    """Return a name such as "float32". Not collective."""
    return str(dtype).removeprefix("torch.")


def is_of_a_library(file: str) -> bool:
    """Return whether a file of Python is torch's, mpiddp's or Python's own. Not collective."""
    return any(part in file for part in _LIBRARIES)


def place() -> str:
    """Return where the main thread's program is, such as "now at train.py:30 in load".

    Not collective. "" if it is in no code of the user's.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_of_a_library(file):
            return f"now at {file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def ranks_in_words(world_ranks: Sequence[int], members: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0 to 3 and 7"; "world rank 3" where the group is not all ranks.

    Not collective.

    Args:
        world_ranks: the world rank of each of the group's ranks.
        members: ranks in the group.
    """
    ordered = sorted(world_ranks[member] for member in members)
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
    world = "" if list(world_ranks) == list(range(len(world_ranks))) else "world "
    return f"{world}rank{'s' * (len(ordered) > 1)} {text}"

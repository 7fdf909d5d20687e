"""With TORCH_DISTRIBUTED_DEBUG=DETAIL: compare what the ranks call before MPI hears of it.

If ranks call different collectives, or one with different tensors, MPI hangs, fails inside or
returns garbage. The ranks of a group first compare a digest of name, operation, root, dtypes and
shapes, and only if it differs, the words. Point-to-point messages are not compared.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from mpiddp.flight_recorder.call_text import describe_call, describe_dtype, ranks_in_words

if TYPE_CHECKING:
    from mpiddp.process_group.interface import RunningGroup

__all__ = ["by_rank", "by_rows", "check", "for_one"]

# How many tensors of a call, and how many different calls, an error shows.
_SHOWN = 4


def check(
    group: RunningGroup,
    name: str,
    detail: object,
    tensors: Sequence[torch.Tensor],
    compared: Callable[[], Iterable[torch.Tensor]] | None = None,
    elements: Callable[[], tuple[Sequence[int], Sequence[int]]] | None = None,
) -> None:
    """Raise on all ranks if they don't call the same collective of `group`.

    Collective over `group`, within its timeout.

    Args:
        group: nothing else is under way in its communicator that other ranks have not entered.
        name: the collective, such as "all_reduce".
        detail: what else must be the same on all ranks: a ReduceOp, a root, or both.
        tensors: what it was called with.
        compared: returns those whose dtypes and shapes must be the same on all ranks, in order,
            one or several per rank; None: `tensors`.
        elements: returns how many elements this rank sends to each and expects from each: both
            ends of a message must agree on it; then shapes may differ.

    Raises:
        RuntimeError: the calls differ (it names ranks and calls); or a rank did not come in time.
    """
    call = describe_call(name, detail)
    same = tensors if compared is None else list(compared())
    sizes = None if elements is None else elements()
    # A list of a wrong length is this rank's own error, which the operation raises.
    if compared is not None and len(same) != group.size() * len(tensors):
        return
    if sizes is not None and any(len(each) != group.size() for each in sizes):
        return
    if sizes is not None:
        own = [describe_dtype(same[0].dtype)] if same else []
    else:
        own = [f"{describe_dtype(tensor.dtype)} {tuple(tensor.shape)}" for tensor in same]
    told = json.dumps([call, own])
    if not _all_equal(group, name, told):
        calls = [json.loads(text) for text in _all_texts(group, name, told)]
        raise RuntimeError(
            f"the ranks of process group {group.group_name!r} call different collectives: "
            f"{_difference(group.world_ranks, calls)}. Nothing was sent."
        )
    if sizes is not None:
        problems = _misfits(group, name, *sizes)
        if not _all_equal(group, name, "yes" if not problems else f"no, {group.rank()}"):
            every = [
                problem
                for text in _all_texts(group, name, json.dumps(problems))
                for problem in json.loads(text)
            ]
            more = f"; and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
            raise RuntimeError(
                f"{call} of {', '.join(own)} on process group {group.group_name!r}: "
                f"{'; '.join(every[:_SHOWN])}{more}. Nothing was sent."
            )


def for_one(group: RunningGroup, rank: int, tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how many elements go to or come from each rank, where one rank has all."""
    total = sum(tensor.numel() for tensor in tensors)
    return [total if other == rank else 0 for other in range(group.size())]


def by_rank(group: RunningGroup, lists: Sequence[Sequence[torch.Tensor]]) -> list[int]:
    """Return how many elements go to or come from each rank: lists of one tensor per rank."""
    if not lists:
        return [0] * group.size()
    return [sum(part.numel() for part in parts) for parts in zip(*lists, strict=True)]


def by_rows(group: RunningGroup, tensor: torch.Tensor, rows: Sequence[int]) -> list[int]:
    """Return how many elements of a tensor go to or come from each rank, by its row counts."""
    if not rows:
        return [tensor.numel() // group.size()] * group.size()
    return [count * (tensor.numel() // max(tensor.size(0), 1)) for count in rows]


def _all_equal(group: RunningGroup, name: str, text: str) -> bool:
    """Return whether all ranks have the same text. Collective."""
    (digest,) = struct.unpack("<q", hashlib.blake2b(text.encode(), digest_size=8).digest())
    # The smallest, and the complement of the largest.
    own, least = (
        torch.tensor([digest, ~digest], device="cpu"),
        torch.empty(2, dtype=torch.int64, device="cpu"),
    )
    request = group.communicator.Iallreduce(_buffer(own), _buffer(least), op=MPI.MIN)
    group.wait_for(request, "MPI_Iallreduce", name, own, least)
    return bool(least[0] == ~least[1])


def _all_texts(group: RunningGroup, name: str, text: str) -> list[str]:
    """Return the texts of all ranks, by rank. Collective."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    length = torch.tensor([data.numel()], device="cpu")
    lengths = torch.empty(group.size(), dtype=torch.int64, device="cpu")
    request = group.communicator.Iallgather(_buffer(length), _buffer(lengths))
    group.wait_for(request, "MPI_Iallgather", name, length, lengths)
    counts = lengths.tolist()
    every = torch.empty(sum(counts), dtype=torch.uint8, device="cpu")
    request = group.communicator.Iallgatherv(
        _buffer(data), [_buffer(every)[0], counts, None, MPI.BYTE]
    )
    group.wait_for(request, "MPI_Iallgatherv", name, data, every)
    return [part.numpy().tobytes().decode() for part in torch.split(every, counts)]


def _misfits(
    group: RunningGroup, name: str, sent: Sequence[int], expected: Sequence[int]
) -> list[str]:
    """Return in words which messages to this rank are not what it expects. Collective."""
    outgoing = torch.tensor(list(sent), dtype=torch.int64, device="cpu")
    incoming = torch.empty(group.size(), dtype=torch.int64, device="cpu")
    request = group.communicator.Ialltoall(_buffer(outgoing), _buffer(incoming))
    group.wait_for(request, "MPI_Ialltoall", name, outgoing, incoming)
    own = ranks_in_words(group.world_ranks, [group.rank()])
    return [
        f"{ranks_in_words(group.world_ranks, [rank])} sends {got} elements to {own}, which "
        f"expects {want}"
        for rank, (got, want) in enumerate(zip(incoming.tolist(), expected, strict=True))
        if got != want
    ]


def _buffer(tensor: torch.Tensor) -> list[Any]:
    datatype = MPI.BYTE if tensor.dtype is torch.uint8 else MPI.INT64_T
    return [tensor.numpy(), datatype]


def _difference(world_ranks: Sequence[int], calls: Sequence[tuple[str, list[str]]]) -> str:
    """Return words such as "rank 2 called X where ranks 0 and 1 called Y"."""
    first_difference: int | None = None
    if len({(call, len(tensors)) for call, tensors in calls}) == 1 and len(calls[0][1]) > _SHOWN:
        columns = zip(*(tensors for _, tensors in calls), strict=True)
        first_difference = next(i for i, column in enumerate(columns) if len(set(column)) > 1)
    kinds: dict[str, list[int]] = {}
    for rank, (call, tensors) in enumerate(calls):
        kinds.setdefault(_in_words(call, tensors, first_difference), []).append(rank)
    # The others are compared with what most ranks called; on a tie, with the lowest rank's call.
    most = max(kinds, key=lambda kind: len(kinds[kind]))
    others = [
        f"{ranks_in_words(world_ranks, ranks)} called {kind}"
        for kind, ranks in kinds.items()
        if kind != most
    ]
    more = f", {len(others) - _SHOWN} others differ as well," if len(others) > _SHOWN else ""
    usual = f"{ranks_in_words(world_ranks, kinds[most])} called {most}"
    return f"{', '.join(others[:_SHOWN])}{more} where {usual}"


def _in_words(call: str, tensors: Sequence[str], difference: int | None) -> str:
    if not tensors:
        return call
    if difference is not None:
        return f"{call} with {tensors[difference]} as tensor {difference + 1} of {len(tensors)}"
    more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    return f"{call} of {', '.join(tensors[:_SHOWN])}{more}"

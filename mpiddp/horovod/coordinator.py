"""Decide which operations may start: those that every rank of a process set has submitted.

No MPI and no tensors: the coordinator hears what ranks have submitted, and says what is to be done.

Note [Operations are matched by name]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks may submit operations in any order, but MPI wants collectives of a communicator in the same
order on all ranks. So each rank tells the lowest rank of the process set the name of what it has
submitted, and what must be equal everywhere. When all have named an operation, that rank, the
coordinator, tells all to start it. Every rank starts what it is told, in the order in which it is
told. The name contains the kind, as in Horovod: allreduce.x and allgather.x are two operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from mpiddp.horovod.environment import Settings
from mpiddp.horovod.reduce_ops import Adasum, ReduceOp

__all__ = ["ENDED", "FAIL", "JOINED", "LEFT", "RUN", "Coordinator", "Decision", "Request"]

RUN, FAIL, JOINED, LEFT, ENDED = "run", "fail", "joined", "left", "ended"

# Kinds whose first dimension may differ over ranks.
_RAGGED = ("allgather", "alltoall")
_SLICED = (*_RAGGED, "reducescatter")
# How many names and how many different values an error or a warning lists.
_MOST_LISTED = 6


class Request(NamedTuple):
    """What a rank says about an operation that it has submitted.

    Attributes:
        key: kind and name.
        kind: "allreduce", "barrier" and so on. "join" and "leave" have meanings of their own.
        tensors: dtype and shape of each.
        device: "CPU" or "GPU".
        op: the reduction; -1 where there is none.
        prescale: multiplied before a reduction.
        postscale: multiplied after it.
        root: of a broadcast, as a world rank; -1 elsewhere.
        splits: rows for each rank, in an alltoall.
        detail: anything else that must be equal.
        steps: of a join: how many steps of optimizers this rank has taken part in.
    """

    key: str
    kind: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    device: str = "CPU"
    op: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    detail: str = ""
    steps: int = 0


class Decision(NamedTuple):
    """What every rank of the process set is to do next.

    Attributes:
        what: RUN, FAIL, JOINED (all ranks have joined), LEFT (a rank has, so nothing can be done
            any more: every operation needs all ranks) or ENDED (all have).
        keys: of the operations; several are all-reduces to be done as one.
        requests: one rank's request for each key, where a rank that has joined needs them.
        sizes: for RUN of an allgather: by rank, the rows of each tensor. Of an alltoall: the rows
            that come from each rank.
        text: the error of FAIL, and of all that comes after LEFT.
        rank: of JOINED: the last to join.
    """

    what: str
    keys: tuple[str, ...] = ()
    requests: tuple[Request, ...] = ()
    sizes: tuple[Any, ...] = ()
    text: str = ""
    rank: int = -1

    def for_rank(self, rank: int) -> Decision:
        """Return what one rank must know of it: of an alltoall, only its own rows."""
        if self.what == RUN and self.sizes and self.keys[0].startswith("alltoall."):
            return self._replace(sizes=tuple(row[rank] for row in self.sizes))
        return self


class _Waiting:
    """An operation that some ranks have submitted."""

    def __init__(self, now: float) -> None:
        self.requests: dict[int, Request] = {}
        self.since = now
        self.warned = False


class Coordinator:
    """What the ranks of one process set have submitted. Not collective.

    See Note [Operations are matched by name].

    Args:
        ranks: the world rank of each, for texts.
        settings: of fusion and stalls.
        clock: returns seconds.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = list(ranks)
        self._settings = settings
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._changed: dict[str, None] = {}
        self._joined: list[int] = []
        # Of each: how many steps it has taken part in, and its place in the order of arrival.
        self._steps: list[tuple[int, int]] = []
        self._left: list[int] = []
        self._told_left = 0

    def submit(self, rank: int, request: Request) -> None:
        """Hear what a rank of the set has submitted."""
        if request.kind == "join":
            self._steps.append((request.steps, len(self._joined)))
            self._joined.append(rank)
            self._changed = dict.fromkeys(self._waiting)
        elif request.kind == "leave":
            self._left.append(rank)
        elif not self._left:  # else the rank fails it by itself, when it hears of that
            waiting = self._waiting.get(request.key)
            if waiting is None:
                waiting = self._waiting[request.key] = _Waiting(self._clock())
            waiting.requests[rank] = request
            self._changed[request.key] = None

    def decide(self) -> list[Decision]:
        """Return what is to be done because of what was heard since the last call, in order."""
        changed, self._changed = self._changed, {}
        found: list[Decision] = []
        ready: list[dict[int, Request]] = []
        size, joined = len(self._ranks), set(self._joined)
        for key in changed:
            requests = self._waiting[key].requests
            if len(requests) < size and len(joined | requests.keys()) < size:
                continue
            del self._waiting[key]
            trouble = self._trouble(key, requests)
            if trouble:
                found.append(Decision(FAIL, (key,), text=trouble))
            else:
                ready.append(requests)
        found += self._fused(ready)
        if len(joined) == size:
            # Messages may overtake steps, so these come first.
            _, last = max(self._steps)
            found.append(Decision(JOINED, rank=self._joined[last]))
            self._joined, self._steps = [], []
        if len(self._left) > self._told_left:
            self._told_left = len(self._left)
            self._waiting = {}
            self._joined, self._steps = [], []
            text = f"Horovod has been shut down on {self._named(self._left)}"
            found.append(Decision(LEFT, text=text))
            if len(self._left) == size:
                found.append(Decision(ENDED))
        return found

    def _trouble(self, key: str, requests: dict[int, Request]) -> str:
        """Return why an operation cannot be done, empty if it can."""
        first = next(iter(requests.values()))
        kind = first.kind
        if len(requests) < len(self._ranks) and kind != "allreduce":
            return (
                f"{key} cannot be done: {self._named(self._joined)} called hvd.join(), and only "
                f"all-reduces go on without the ranks that have joined"
            )
        for what, value in _ASPECTS:
            by_value: dict[str, list[int]] = {}
            for rank, request in sorted(requests.items()):
                by_value.setdefault(value(request), []).append(rank)
            if len(by_value) > 1:
                sides = [f"{self._named(who)}: {has}" for has, who in by_value.items()]
                shown = "; ".join(sides[:_MOST_LISTED])
                return f"the ranks differ in the {what} of {key}: {shown}"
        if kind in _SLICED and any(not shape for _, shape in first.tensors):
            return f"{key}: a tensor without dimensions has no rows to divide or to put together"
        return ""

    def _fused(self, ready: Iterable[dict[int, Request]]) -> list[Decision]:
        """Return decisions to run operations; all-reduces of a kind are put together."""
        found: list[Decision] = []
        open_ones: dict[tuple[Any, ...], tuple[int, int]] = {}
        for requests in ready:
            request = next(iter(requests.values()))
            partial = (request,) if self._joined else ()
            if request.kind != "allreduce" or request.op == Adasum:
                found.append(Decision(RUN, (request.key,), partial, self._sizes(requests)))
                continue
            signature = (
                request.tensors[0][0],
                request.op,
                request.prescale,
                request.postscale,
                request.device,
                len({dtype for dtype, _ in request.tensors}),
            )
            nbytes = sum(bytes_of(*tensor) for tensor in request.tensors)
            at, filled = open_ones.get(signature, (-1, 0))
            if at >= 0 and signature[-1] == 1 and filled + nbytes <= self._settings.fusion_bytes:
                before = found[at]
                found[at] = before._replace(
                    keys=(*before.keys, request.key), requests=before.requests + partial
                )
                open_ones[signature] = (at, filled + nbytes)
            else:
                open_ones[signature] = (len(found), nbytes)
                found.append(Decision(RUN, (request.key,), partial))
        return found

    def _sizes(self, requests: dict[int, Request]) -> tuple[Any, ...]:
        in_order = [request for _, request in sorted(requests.items())]
        if in_order[0].kind == "allgather":
            return tuple(tuple(shape[0] for _, shape in each.tensors) for each in in_order)
        if in_order[0].kind == "alltoall":
            return tuple(each.splits for each in in_order)
        return ()

    def stalls(self) -> tuple[str, list[Decision]]:
        """Return a warning, empty if there is none, and failures of what has waited too long."""
        limit, last = self._settings.stall_seconds, self._settings.stall_error_seconds
        if not limit and not last:
            return "", []
        now = self._clock()
        late, failures = [], []
        for key, waiting in list(self._waiting.items()):
            waited = now - waiting.since
            here = set(waiting.requests) | set(self._joined)
            missing = [rank for rank in range(len(self._ranks)) if rank not in here]
            text = (
                f"{key}: {self._named(waiting.requests)} waited {waited:.0f} s, "
                f"{self._named(missing)} did not come"
            )
            if last and waited > last:
                del self._waiting[key]
                failures.append(
                    Decision(
                        FAIL, (key,), text=f"{text} (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={last:g})"
                    )
                )
            elif limit and waited > limit and not waiting.warned:
                waiting.warned = True
                late.append(text)
        if not late:
            return "", failures
        more = f" and {len(late) - _MOST_LISTED} more" if len(late) > _MOST_LISTED else ""
        warning = (
            f"operations wait for ranks that have not submitted them for more than {limit:g} s; "
            f"do all ranks submit the same operations? {'; '.join(late[:_MOST_LISTED])}{more}"
        )
        return warning, failures

    def _named(self, members: Iterable[int]) -> str:
        """Return ranks in words, as hvd.rank() counts them."""
        ranks = sorted(self._ranks[member] for member in members)
        return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def bytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bytes. Not collective."""
    return prod(shape) * dtype_of(dtype).itemsize


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that a request names. Not collective."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _shapes(request: Request) -> str:
    ragged = request.kind in _RAGGED
    shapes = []
    for _, shape in request.tensors:
        shown = ["..." if ragged and place == 0 else str(n) for place, n in enumerate(shape)]
        shapes.append(f"({', '.join(shown)})")
    return " ".join(shapes)


def _op(request: Request) -> str:
    return ReduceOp(request.op).name if request.op >= 0 else "none"


# What must be equal on all ranks, and how to say it.
_ASPECTS: tuple[tuple[str, Callable[[Request], str]], ...] = (
    ("number of tensors", lambda request: str(len(request.tensors))),
    ("data type", lambda request: " ".join(dtype for dtype, _ in request.tensors)),
    ("shape", _shapes),
    ("reduction", _op),
    ("factors", lambda request: f"{request.prescale:g} before, {request.postscale:g} after"),
    ("root rank", lambda request: str(request.root)),
    ("device", lambda request: request.device),
    ("arguments", lambda request: request.detail),
)

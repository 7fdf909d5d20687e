"""Collectives of several groups as programs drawn at random run them, here and on Gloo.

All numbers are small and whole, so that sums are exact in any order. Gloo runs what a program says
one call after another, on tensors of the plainest layout.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch_versions
from group_data import rank

__all__ = ["Drawn", "draw_program", "has_this_rank", "run_on_gloo", "run_together"]

Tensors = list[torch.Tensor]
Op = dist.ReduceOp

OPS = {each.name: each for each in (Op.SUM, Op.MAX, Op.MIN, Op.PRODUCT)}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
LAYOUTS = ["plain", "strided", "part of more", "own part"]
CALLS = 40
# Elements of one rank: in one line, in one meeting, in slices, in halves, and in several rounds.
COUNTS = [0, 1, 7, 16, 300, 5_000, 33_333, 131_073, 400_000]


@dataclass(frozen=True)
class Drawn:
    """One call of a program.

    Attributes:
        kind: which collective, one of `KINDS`.
        group: which of the groups; a rank that is not in it does not call.
        dtype: of all tensors.
        op: of a reduction.
        count: elements of one rank's part.
        root: the rank in the group, of its size the remainder.
        layout: of the tensors.
        later: whether it is asynchronous.
        waits: how many of those under way are waited for then.
        how: how they are waited for.
        seed: of the order in which each rank waits.
    """

    kind: str
    group: int
    dtype: torch.dtype
    op: str
    count: int
    root: int
    layout: str
    later: bool
    waits: int
    how: str
    seed: int


class _Call:
    """A drawn call on this rank, of one group.

    Attributes:
        outputs: what it writes, in order.
    """

    def __init__(self, drawn: Drawn, number: int, group: Any, plain: bool) -> None:
        self.drawn, self.number, self.group, self.plain = drawn, number, group, plain
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.root = drawn.root % self.size
        self.world_root = dist.get_global_rank(group, self.root)
        self.op = OPS[drawn.op]
        self.outputs: Tensors = []

    def numbers(self, count: int, part: int = 0) -> torch.Tensor:
        """Return what this rank has for another, the same in each run of the program."""
        seed = 7919 * self.number + 101 * rank() + part
        drawn = torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(seed))
        if self.drawn.dtype is not torch.uint8:
            drawn -= 2
        return self.placed(drawn.to(self.drawn.dtype))

    def room(self, count: int) -> torch.Tensor:
        """Return room for a result; it is not zero."""
        made = self.placed(torch.full((count,), 5, dtype=self.drawn.dtype))
        self.outputs.append(made)
        return made

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the layout that was drawn."""
        if self.plain or self.drawn.layout in ("plain", "own part"):
            return tensor
        if self.drawn.layout == "strided":
            whole = torch.zeros(2 * len(tensor), dtype=tensor.dtype)
            return whole[::2].copy_(tensor)
        whole = torch.zeros(len(tensor) + 5, dtype=tensor.dtype)
        return whole[3 : 3 + len(tensor)].copy_(tensor)

    def start(self, later: bool) -> Any:
        """Call it; return a Work, or None."""
        return KINDS[self.drawn.kind](self, {"group": self.group, "async_op": later})


def _all_reduce(call: _Call, how: dict[str, Any]) -> Any:
    tensor = call.numbers(call.drawn.count)
    call.outputs.append(tensor)
    return dist.all_reduce(tensor, call.op, **how)


def _all_reduce_coalesced(call: _Call, how: dict[str, Any]) -> Any:
    tensors = [call.numbers(call.drawn.count), call.numbers(3, 1)]
    call.outputs += tensors
    if call.plain:
        for tensor in tensors:
            dist.all_reduce(tensor, call.op, group=call.group)
        return None
    later = how["async_op"]
    with dist._coalescing_manager(group=call.group, async_ops=later) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, call.op, group=call.group)
    return manager if later else None


def _reduce(call: _Call, how: dict[str, Any]) -> Any:
    tensor = call.numbers(call.drawn.count)
    # What others than the root have then is nobody's: Gloo leaves parts of sums there.
    if call.rank == call.root:
        call.outputs.append(tensor)
    return dist.reduce(tensor, call.world_root, call.op, **how)


def _broadcast(call: _Call, how: dict[str, Any]) -> Any:
    tensor = call.numbers(call.drawn.count)
    call.outputs.append(tensor)
    return dist.broadcast(tensor, call.world_root, **how)


def _all_gather(call: _Call, how: dict[str, Any]) -> Any:
    parts = [call.room(call.drawn.count) for _ in range(call.size)]
    own = call.numbers(call.drawn.count)
    if call.drawn.layout == "own part":
        own = parts[call.rank].copy_(own)
    return dist.all_gather(parts, own, **how)


def _all_gather_single(call: _Call, how: dict[str, Any]) -> Any:
    whole, own = call.room(call.drawn.count * call.size), call.numbers(call.drawn.count)
    if call.drawn.layout == "own part":
        own = whole.chunk(call.size)[call.rank].copy_(own) if len(own) else own
    return torch_versions.all_gather_single(whole, own, **how)


def _reduce_scatter(call: _Call, how: dict[str, Any]) -> Any:
    parts = [call.numbers(call.drawn.count, part) for part in range(call.size)]
    if call.plain:
        whole = torch.cat(parts)
        dist.all_reduce(whole, call.op, group=call.group)
        call.room(call.drawn.count).copy_(whole[call.rank * call.drawn.count :][: len(parts[0])])
        return None
    if call.drawn.layout == "own part":
        call.outputs.append(parts[call.rank])
        return dist.reduce_scatter(parts[call.rank], parts, call.op, **how)
    return dist.reduce_scatter(call.room(call.drawn.count), parts, call.op, **how)


def _reduce_scatter_single(call: _Call, how: dict[str, Any]) -> Any:
    whole = call.numbers(call.drawn.count * call.size)
    if call.drawn.layout == "own part" and call.drawn.count:
        output = whole.chunk(call.size)[call.rank]
        call.outputs.append(output)
    else:
        output = call.room(call.drawn.count)
    if call.plain:  # so that each torch's Gloo can
        whole = whole.clone()
        dist.all_reduce(whole, call.op, group=call.group)
        output.copy_(whole[call.rank * call.drawn.count :][: call.drawn.count])
        return None
    return torch_versions.reduce_scatter_single(output, whole, call.op, **how)


def _gather(call: _Call, how: dict[str, Any]) -> Any:
    here = call.rank == call.root
    parts = [call.room(call.drawn.count) for _ in range(call.size)] if here else None
    return dist.gather(call.numbers(call.drawn.count), parts, call.world_root, **how)


def _scatter(call: _Call, how: dict[str, Any]) -> Any:
    here = call.rank == call.root
    parts = [call.numbers(call.drawn.count, part) for part in range(call.size)] if here else None
    return dist.scatter(call.room(call.drawn.count), parts, call.world_root, **how)


def _all_to_all(call: _Call, how: dict[str, Any]) -> Any:
    """Send each rank another number of elements."""
    sent = [call.drawn.count + to for to in range(call.size)]
    parts = [call.numbers(count, to) for to, count in enumerate(sent)]
    received = [sent[call.rank]] * call.size
    if call.plain:  # Gloo has no list
        whole = call.room(sum(received))
        dist.all_to_all_single(whole, torch.cat(parts), received, sent, group=call.group)
        call.outputs = list(whole.split(received))
        return None
    return dist.all_to_all([call.room(count) for count in received], parts, **how)


def _all_to_all_single(call: _Call, how: dict[str, Any]) -> Any:
    whole = call.room(call.drawn.count * call.size)
    tensor = call.numbers(call.drawn.count * call.size)
    if call.plain:
        return dist.all_to_all_single(whole, tensor, group=call.group)
    return dist.all_to_all_single(whole, tensor, **how)


def _all_to_all_splits(call: _Call, how: dict[str, Any]) -> Any:
    """Let the first rank send nothing to the last."""
    count, last = call.drawn.count, call.size - 1
    sent = [0 if call.rank == 0 and to == last else count + to for to in range(call.size)]
    received = [
        0 if call.rank == last and of == 0 else count + call.rank for of in range(call.size)
    ]
    whole = call.room(sum(received))
    return dist.all_to_all_single(whole, call.numbers(sum(sent)), received, sent, **how)


def _barrier(call: _Call, how: dict[str, Any]) -> Any:
    return dist.barrier(**how)


def _objects(call: _Call, how: dict[str, Any]) -> Any:
    """Gather objects, whose sizes differ."""
    gathered: list[Any] = [None] * call.size
    dist.all_gather_object(gathered, "x" * (call.rank + call.drawn.count % 1000), call.group)
    call.outputs.append(torch.tensor([len(each) for each in gathered]))


KINDS: dict[str, Callable[[_Call, dict[str, Any]], Any]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_splits": _all_to_all_splits,
    "barrier": _barrier,
    "objects": _objects,
}


def has_this_rank(group: Any) -> bool:
    """Return whether `group`, of `new_group`, has this rank."""
    return group != dist.GroupMember.NON_GROUP_MEMBER


def draw_program(draw: random.Random, groups: int) -> list[Drawn]:
    """Return calls of so many groups."""
    return [
        Drawn(
            kind=draw.choice(list(KINDS)),
            group=draw.randrange(groups),
            dtype=draw.choice(DTYPES),
            op=draw.choice(list(OPS)),
            count=draw.choice(COUNTS),
            root=draw.randrange(8),
            layout=draw.choice(LAYOUTS),
            later=draw.random() < 0.5,
            waits=draw.randrange(4),
            how=draw.choice(["wait", "poll", "future"]),
            seed=draw.randrange(1000),
        )
        for _ in range(CALLS)
    ]


def _wait(work: Any, how: str) -> None:
    """Wait for a Work in one of the ways that there are."""
    if how == "poll":
        while not work.is_completed():
            pass
    elif how == "future":
        work.get_future().wait()
    work.wait()


def run_together(program: Sequence[Drawn], groups: Sequence[Any]) -> list[Tensors]:
    """Run a program; return what each call of this rank has written. Collective.

    Which of those under way a rank waits for first is drawn, for each rank another.
    """
    calls: list[_Call] = []
    under_way: list[Any] = []
    for number, drawn in enumerate(program):
        group = groups[drawn.group]
        if not has_this_rank(group):
            continue
        calls.append(_Call(drawn, number, group, plain=False))
        work = calls[-1].start(drawn.later)
        order = random.Random(drawn.seed + rank())
        if work is not None and drawn.later:
            under_way.append(work)
        for _ in range(min(drawn.waits, len(under_way))):
            # What several works have made together has no future.
            one = under_way.pop(order.randrange(len(under_way)))
            _wait(one, drawn.how if isinstance(one, dist.Work) else "wait")
    for work in reversed(under_way):
        work.wait()
    return [call.outputs for call in calls]


def run_on_gloo(program: Sequence[Drawn], groups: Sequence[Any]) -> list[Tensors]:
    """Run a program on groups of Gloo; return what each call of this rank has written."""
    calls: list[_Call] = []
    for number, drawn in enumerate(program):
        group = groups[drawn.group]
        if has_this_rank(group):
            calls.append(_Call(drawn, number, group, plain=True))
            calls[-1].start(later=False)
    return [call.outputs for call in calls]

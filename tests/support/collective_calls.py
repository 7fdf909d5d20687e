"""Each collective as a call that a test can make with tensors wherever it wants them.

What the tensors hold before and after the call is left to the test.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch_versions
from group_data import group, make, rank, size

Tensors = list[torch.Tensor]


class Call(NamedTuple):
    """A collective of given tensors.

    Attributes:
        read: tensors that it reads, with what they hold at first on this rank.
        room: tensors that it only writes to.
        run: calls it with such tensors, asynchronously or not, and returns Works to wait for.
        writes_read: whether it writes to those that it reads.
    """

    read: Tensors
    room: Tensors
    run: Callable[[Tensors, Tensors, bool], Sequence[Any]]
    writes_read: bool = False

    def written(self, read: Tensors, room: Tensors) -> Tensors:
        """Return those of the tensors that hold the result."""
        return read if self.writes_read else room


def own(count: int = 61, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return make(dtype, rank(), count)


def room(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)


def _works(work: Any) -> Sequence[Any]:
    return [] if work is None else [work]


def calls() -> dict[str, Callable[[], Call]]:
    """Return for each collective, by its name, how to make its call."""

    def all_reduce() -> Call:
        return Call(
            [own()],
            [],
            lambda read, _, later: _works(dist.all_reduce(read[0], async_op=later)),
            True,
        )

    def all_reduce_of_16_bits() -> Call:
        return all_reduce()._replace(read=[own(dtype=torch.bfloat16)])

    def all_reduce_together() -> Call:
        def run(read: Tensors, _: Tensors, later: bool) -> Sequence[Any]:
            options = dist.AllreduceCoalescedOptions()
            options.asyncOp = later
            return _works(group().allreduce_coalesced(read, options))

        return Call([own(), own(7)], [], run, True)

    def broadcast() -> Call:
        return Call(
            [own()],
            [],
            lambda read, _, later: _works(dist.broadcast(read[0], size() - 1, async_op=later)),
            True,
        )

    def reduce() -> Call:
        return Call(
            [own()],
            [],
            lambda read, _, later: _works(dist.reduce(read[0], size() - 1, async_op=later)),
            True,
        )

    def reduce_scatter() -> Call:
        return Call(
            [make(torch.float32, rank() + part, 5 + part) for part in range(size())],
            [room(5 + rank())],
            lambda read, room, later: _works(dist.reduce_scatter(room[0], read, async_op=later)),
        )

    def reduce_scatter_single() -> Call:
        return Call(
            [own(4 * size())],
            [room(4)],
            lambda read, room, later: _works(
                torch_versions.reduce_scatter_single(room[0], read[0], async_op=later)
            ),
        )

    def all_gather() -> Call:
        return Call(
            [own(3 + rank())],
            [room(3 + other) for other in range(size())],
            lambda read, room, later: _works(dist.all_gather(room, read[0], async_op=later)),
        )

    def all_gather_single() -> Call:
        return Call(
            [own(6)],
            [room(6 * size())],
            lambda read, room, later: _works(
                torch_versions.all_gather_single(room[0], read[0], async_op=later)
            ),
        )

    def gather() -> Call:
        here = rank() == size() - 1
        return Call(
            [own(3 + rank())],
            [room(3 + other) for other in range(size())] if here else [],
            lambda read, room, later: _works(
                dist.gather(read[0], room if here else None, size() - 1, async_op=later)
            ),
        )

    def scatter() -> Call:
        here = rank() == size() - 1
        return Call(
            [make(torch.float32, other, 3 + other) for other in range(size())] if here else [],
            [room(3 + rank())],
            lambda read, room, later: _works(
                dist.scatter(room[0], read if here else None, size() - 1, async_op=later)
            ),
        )

    def all_to_all() -> Call:
        return Call(
            [own(2 + other) for other in range(size())],
            [room(2 + rank()) for _ in range(size())],
            lambda read, room, later: _works(dist.all_to_all(room, read, async_op=later)),
        )

    def all_to_all_single() -> Call:
        sent, received = [1 + other for other in range(size())], [1 + rank()] * size()
        return Call(
            [own(sum(sent))],
            [room(sum(received))],
            lambda read, room, later: _works(
                dist.all_to_all_single(room[0], read[0], received, sent, async_op=later)
            ),
        )

    def messages() -> Call:
        def run(read: Tensors, room: Tensors, later: bool) -> Sequence[Any]:
            right, left = (rank() + 1) % size(), (rank() - 1) % size()
            sending = dist.isend(read[0], right)
            if not later:
                dist.recv(room[0], left)
                return [sending]
            return [sending, dist.irecv(room[0], left)]

        return Call([own()], [room(61)], run)

    def batch_of_messages() -> Call:
        def run(read: Tensors, room: Tensors, later: bool) -> Sequence[Any]:
            right, left = (rank() + 1) % size(), (rank() - 1) % size()
            return dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, room[0], left), dist.P2POp(dist.isend, read[0], right)]
            )

        return Call([own()], [room(61)], run)

    def coalesced() -> Call:
        def run(read: Tensors, _: Tensors, later: bool) -> Sequence[Any]:
            with dist._coalescing_manager(async_ops=later) as manager:
                for tensor in read:
                    dist.all_reduce(tensor)
            return [manager] if later else []

        return Call([own(), own(9)], [], run, True)

    def coalesced_the_old_way() -> Call:
        def run(read: Tensors, room: Tensors, later: bool) -> Sequence[Any]:
            group()._start_coalescing(read[0].device)
            dist.irecv(room[0], (rank() - 1) % size())
            dist.isend(read[0], (rank() + 1) % size())
            return [group()._end_coalescing(read[0].device)]

        return Call([own()], [room(61)], run)

    made = [
        all_reduce,
        all_reduce_of_16_bits,
        all_reduce_together,
        broadcast,
        reduce,
        reduce_scatter,
        reduce_scatter_single,
        all_gather,
        all_gather_single,
        gather,
        scatter,
        all_to_all,
        all_to_all_single,
        messages,
        batch_of_messages,
        coalesced,
        coalesced_the_old_way,
    ]
    return {call.__name__: call for call in made}


def on_host(call: Call) -> Tensors:
    """Return what the tensors that `call` writes to hold after it, on the CPU. Collective."""
    read, room = [t.clone() for t in call.read], [t.clone() for t in call.room]
    for work in call.run(read, room, False):
        work.wait()
    return call.written(read, room)

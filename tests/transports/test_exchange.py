"""The direct exchange and the one in two levels, to the bit, with ranks in the place of nodes.

The reference adds in the same order and rounds where a number is sent.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from models import Given
from replicas import RANK, SIZE, together
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp import compression
from mpiddp.mpi import nodes
from mpiddp.transports import wire_choice
from mpiddp.transports.wire import Wire

# The node of each rank, and the way that chunks take between nodes.
NODES = {
    "one rank a node": ([0, 1, 2, 3, 4, 5, 6, 7], "direct"),
    "two and two": ([0, 0, 1, 1, 2, 2, 3, 3], "direct"),
    "in turn": ([0, 1, 0, 1, 0, 1, 0, 1], "direct"),
    "backwards": ([1, 0, 0, 1, 2, 0, 2, 1], "direct"),
    "one and three": ([0, 1, 1, 1, 2, 2, 2, 2], "direct"),
    "two levels": ([0, 1, 2, 3, 4, 5, 6, 7], "two-level"),
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
HOOKS = {torch.float16: compression.fp16, torch.bfloat16: compression.bf16}


class Layout(NamedTuple):
    """Which nodes the ranks of a group are on, and how chunks travel between these."""

    place: list[int]
    way: str
    group: dist.ProcessGroup


@pytest.fixture(params=NODES)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Layout]:
    """Return a layout of the ranks for whose group modules may be wrapped."""
    place, way = NODES[request.param]
    place = place[:SIZE]
    if way == "two-level" and wire_choice.groups_of(len(set(place))) is None:
        pytest.skip(f"{len(set(place))} nodes make no groups of equal size; 4 make two")
    monkeypatch.setenv("MPIDDP_WIRE", way)
    monkeypatch.setattr(nodes, "ranks_of_node", lambda comm: comm.Split(place[RANK], RANK))
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    yield Layout(place, way, group)
    dist.destroy_process_group(group)


def rounded(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a sum as it arrives in another rank."""
    return total.to(dtype).to(total.dtype)


def sum_in_order(given: list[Tensor]) -> Tensor:
    total = given[0]
    for each in given[1:]:
        total = total + each
    return total


def expected(given: list[Tensor], layout: Layout) -> Tensor:
    """Return the mean of all ranks' gradients, added as chunks are."""
    dtype = given[0].dtype
    wide = torch.float32 if dtype in HOOKS else dtype
    order = list(dict.fromkeys(layout.place))
    sums = []
    for node in order:
        here = [each.to(wide) for each, at in zip(given, layout.place, strict=True) if at == node]
        sums.append(rounded(sum_in_order(here), dtype))
    if layout.way == "two-level":
        group = wire_choice.groups_of(len(order))
        assert group is not None
        sums = [
            rounded(sum_in_order(sums[first : first + group]), dtype)
            for first in range(0, len(sums), group)
        ]
    return (sum_in_order(sums) / len(given)).to(dtype)


def gradient_of(rank: int, step: int, elements: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.essential(keep=4)
@pytest.mark.smoke(keep=1)
@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [1, 2, 3, 5, 1000, 300_001, 700_001])
@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes
def test_bits(layout: Layout, dtype: torch.dtype, elements: int) -> None:
    """Fewer than nodes, no multiple of them, one long chunk, many chunks."""
    module = Given(elements, dtype)
    wrapped = DDP(module, process_group=layout.group)
    for step in range(3):
        wrapped.zero_grad()
        wrapped().backward(gradient_of(RANK, step, elements, dtype))
        given = [gradient_of(rank, step, elements, dtype) for rank in range(SIZE)]
        if dtype.is_complex:
            given = [torch.view_as_real(each) for each in given]
        mean = expected(given, layout)
        gradient = module.parameter.grad
        assert gradient is not None
        if dtype.is_complex:
            gradient = torch.view_as_real(gradient)
        with together():
            # One node adds in its memory.
            assert len(set(layout.place)) == 1 or torch.equal(gradient, mean)


@pytest.mark.thorough(keep=12)
@pytest.mark.parametrize("sent", HOOKS, ids=str)
@pytest.mark.parametrize("elements", [3, 300_001])
@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes
def test_bits_with_a_hook(
    layout: Layout,
    views: bool,
    sent: torch.dtype,
    elements: int,
) -> None:
    module = Given(elements, torch.float32)
    wrapped = DDP(module, process_group=layout.group, gradient_as_bucket_view=views)
    wrapped.register_comm_hook(None, HOOKS[sent])
    for step in range(3):
        wrapped.zero_grad()
        wrapped().backward(gradient_of(RANK, step, elements, torch.float32))
        given = [gradient_of(rank, step, elements, torch.float32) for rank in range(SIZE)]
        mean = expected([each.to(sent) for each in given], layout).float()
        gradient = module.parameter.grad
        assert gradient is not None
        with together():
            assert len(set(layout.place)) == 1 or torch.equal(gradient, mean)


@pytest.mark.thorough(keep=3)
@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes
def test_late_nodes(layout: Layout) -> None:
    """Many buckets, of several dtypes, some whose sums overflow, and another late rank each step.

    So chunks arrive in different orders, and each kind of collective must still match.
    """
    sizes = [200_001, 10, 3, 150_000, 400_000, 77, 100_001]
    dtypes = [torch.float32, torch.float16]
    parameters = nn.ParameterList(
        torch.zeros(size, dtype=dtypes[index % 2]) for index, size in enumerate(sizes)
    )

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given = parameters

        def forward(self, factors: list[Tensor]) -> Tensor:
            products = zip(self.given, factors, strict=True)
            return torch.stack([(p * f).sum(dtype=torch.float32) for p, f in products]).sum()

    wrapped = DDP(Products(), process_group=layout.group, bucket_cap_mb=0.2)
    for step in range(6):
        factors = []
        for index, (size, parameter) in enumerate(zip(sizes, parameters, strict=True)):
            factor = torch.full((size,), float(index + 1), dtype=parameter.dtype)
            if (index + step) % 3 == 0:
                factor[step::50_000] = torch.finfo(parameter.dtype).max
            factors.append(factor)
        wrapped.zero_grad()
        loss = wrapped(factors)
        if step % SIZE == RANK:
            time.sleep(0.03)
        loss.backward()
        with together():
            for parameter, factor in zip(parameters, factors, strict=True):
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, factor)


@pytest.mark.mpi(min_size=3)
@pytest.mark.sizes
def test_sizes_take_different_ways() -> None:
    """Of one wire, chunks of some sizes and widths go one way, and others another."""
    from mpi4py import MPI

    from mpiddp.engine.engine import Engine
    from mpiddp.engine.single_all_reduce import SingleAllReduce
    from mpiddp.transports.messages import MessageTransport

    group = wire_choice.groups_of(SIZE) or 1
    ways = {
        2: [(0, "iallreduce"), (1 << 12, "direct")],
        4: [(0, "iallreduce"), (1 << 10, "two-level"), (1 << 13, "direct")],
        8: [(0, "two-level")],
    }
    wire = Wire(MPI.COMM_WORLD, chunk_bytes=1 << 14, window=5, ways=ways, group=group)
    engine = Engine()
    channel = engine.open_channel(MessageTransport(wire), MPI.COMM_WORLD)
    cases = [
        (elements, dtype)
        for elements in (3, 700, 1500, 2600, 40_000)
        for dtype in (torch.float32, torch.float16, torch.float64)
    ]
    memories = channel.allocate([elements * dtype.itemsize for elements, dtype in cases])
    for step in range(5):
        jobs = []
        for (elements, dtype), memory in zip(cases, memories, strict=True):
            memory.buffer.view(dtype).copy_(torch.arange(elements) % 5 + RANK + step)
            jobs.append(SingleAllReduce(channel, memory, dtype, float(SIZE)))
            jobs[-1].submit()
        for job in jobs:
            job.wait(20)
        with together():
            for (elements, dtype), memory in zip(cases, memories, strict=True):
                mean = torch.arange(elements) % 5 + (SIZE - 1) / 2 + step
                assert torch.equal(memory.buffer.view(dtype), mean.to(dtype))
    engine.close_channel(channel)
    engine.stop()
    wire.free()


@pytest.mark.mpi(min_size=2)
def test_wire_checks_its_settings() -> None:
    from mpi4py import MPI

    for settings, text in (
        ({"chunk_bytes": 100}, "chunk_bytes"),
        ({"window": 17}, "window"),
        ({"group": 2}, "group must be a divisor of 1, not 2"),
    ):
        with pytest.raises(ValueError, match=text):
            Wire(MPI.COMM_SELF, **settings)  # type: ignore[arg-type]

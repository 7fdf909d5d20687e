"""The transport between nodes, with groups of this machine's ranks in the place of nodes."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Given, mlp
from pretended_nodes import NODES, group_on
from replicas import RANK, SIZE, assert_replicated, together
from torch import nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.mpi import nodes
from mpiddp.transports import choice

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes]


@pytest.fixture(params=NODES.values(), ids=NODES.keys())
def group(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dist.ProcessGroup]:
    """Return a group for whose modules the ranks are on these nodes."""
    with group_on(request.param, monkeypatch) as made:
        yield made


@pytest.mark.essential(keep=1)
def test_lanes_are_used(group: dist.ProcessGroup) -> None:
    wrapped = DDP(nn.Linear(1, 1), process_group=group, transport="shared")
    used = type(wrapped.reducer.channel.transport).__name__
    one_node = len(set(NODES["three and one"][:SIZE])) == 1
    assert used == "LaneTransport" or (one_node and used == "SharedTransport")


@pytest.mark.essential(keep=4)
@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64],
    ids=str,
)
@pytest.mark.parametrize("elements", [1, 1000, 700_001])
def test_same_as_mpi(group: dist.ProcessGroup, elements: int, dtype: torch.dtype) -> None:
    """Small whole numbers, whose sum is exact in any order."""
    gradients = []
    for name in ("shared", "mpi"):
        module = Given(elements, dtype)
        wrapped = DDP(module, process_group=group, transport=name)
        for step in range(3):
            wrapped.zero_grad()
            given = torch.arange(elements) % 13 + RANK * (step + 1)
            wrapped().backward(given.to(dtype))
        gradient = module.parameter.grad
        assert gradient is not None
        gradients.append(gradient)
    with together():
        assert torch.equal(*gradients)


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=1)
def test_many_buckets(group: dist.ProcessGroup, views: bool) -> None:
    """More than the window holds, of one chunk and of several, with late ranks."""
    model = mlp(40, 900, 900, 30, 700, 1000, 10, dtype=torch.float32)
    reference = mlp(40, 900, 900, 30, 700, 1000, 10, dtype=torch.float32)
    reference.load_state_dict(model.state_dict())
    settings: dict[str, Any] = {
        "bucket_cap_mb": 0.1,
        "gradient_as_bucket_view": views,
        "process_group": group,
    }
    lanes = DDP(model, transport="shared", **settings)
    flat = DDP(reference, transport="mpi", **settings)
    for step in range(4):
        inputs = torch.randn(SIZE, 4, 40)[RANK]
        for wrapped in (lanes, flat):
            wrapped.zero_grad()
            loss = wrapped(inputs).square().sum()
            if step % SIZE == RANK:
                time.sleep(0.02)
            loss.backward()
        assert_replicated(lanes)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(("chunk_bytes", "window"), [(0, 2), (100, 2), (1 << 30, 2), (64, 0)])
def test_settings_are_checked(chunk_bytes: int, window: int) -> None:
    from mpi4py import MPI

    from mpiddp.transports.lanes import LaneTransport

    with pytest.raises(ValueError, match="chunk_bytes" if window == 2 else "window"):
        LaneTransport(MPI.COMM_SELF, MPI.COMM_SELF, chunk_bytes=chunk_bytes, window=window)


def test_chunks_between_nodes(group: dist.ProcessGroup) -> None:
    """With one rank a node, more nodes have more chunks on their way, which are larger.

    The flags behind the gradients join the last chunk.
    """
    wrapped = DDP(Given(1 << 20, torch.float32), process_group=group, transport="mpi")
    counters = wrapped.reducer.channel.engine.counters
    wrapped().backward(torch.ones(1 << 20))
    chunks = wrapped.reducer.channel.engine.counters["chunks"] - counters["chunks"]
    nodes = len({next(iter(ranks)) for ranks in _ranks_of_nodes(group)})
    with together():
        assert chunks == (4 << 20) // choice.chunks_in_flight(nodes, "iallreduce")[1]


def _ranks_of_nodes(group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    everyone: list[Any] = [None] * SIZE
    node = nodes.ranks_of_node(group.communicator)  # type: ignore[attr-defined]
    dist.all_gather_object(everyone, tuple(sorted(node.allgather(RANK))))
    node.Free()
    return everyone


def test_more_nodes_never_have_less_on_their_way() -> None:
    settings = [choice.chunks_in_flight(nodes) for nodes in range(1, 5000)]
    assert settings == sorted(settings)
    for window, chunk_bytes in settings:
        assert 2 <= window <= 16
        assert 2 * window * chunk_bytes <= 16 << 20


def test_buffers(group: dist.ProcessGroup) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    wrapped = DDP(model, process_group=group, transport="shared")
    for _ in range(3):
        with torch.no_grad():
            for buffer in model.buffers():
                buffer += RANK
        wrapped(torch.randn(2, 3)).sum().backward()
        wrapped.eval()
        wrapped(torch.randn(2, 3))
        wrapped.train()
        assert_replicated(wrapped)

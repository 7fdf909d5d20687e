"""More elements than MPI's counts can tell: pieces, tried with a small limit in MPI's place."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_versions
from group_data import assert_same_bits, make, rank, size

from mpiddp.collectives import point_to_point
from mpiddp.mpi import datatypes

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

LIMIT = 7  # neither 4-byte elements nor parts end there


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(point_to_point, "LARGEST_COUNT", LIMIT)
    truly = datatypes.buffer_of

    def checked(tensor: torch.Tensor, datatype: Any = None) -> tuple[Any, int, Any]:
        memory, count, kind = truly(tensor, datatype)
        assert count <= LIMIT
        return memory, count, kind

    monkeypatch.setattr(datatypes, "buffer_of", checked)


@pytest.mark.essential
def test_reductions() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        total = sum(make(dtype, seed) for seed in range(size()))
        tensor = make(dtype, rank())
        dist.all_reduce(tensor)
        assert_same_bits(tensor, total)
        tensor = make(dtype, rank())
        dist.reduce(tensor, dst=size() - 1)
        if rank() == size() - 1:
            assert_same_bits(tensor, total)
    whole = torch.stack([make(torch.float32, rank() + 10 * to) for to in range(size())])
    output = torch.empty(61)
    torch_versions.reduce_scatter_single(output, whole)
    assert_same_bits(output, sum(make(torch.float32, s + 10 * rank()) for s in range(size())))
    parts = [torch.full((10 + to,), float(rank())) for to in range(size())]
    output = torch.empty(10 + rank())
    dist.reduce_scatter(output, parts)
    assert_same_bits(output, torch.full((10 + rank(),), float(sum(range(size())))))


def test_data_movement() -> None:
    tensor = make(torch.float32, rank())
    dist.broadcast(tensor, src=size() - 1)
    assert_same_bits(tensor, make(torch.float32, size() - 1))
    everyone = torch.empty(size(), 61)
    torch_versions.all_gather_single(everyone, make(torch.float32, rank()))
    outputs = [torch.empty(seed + 3) for seed in range(size())]
    dist.all_gather(outputs, make(torch.float32, rank(), rank() + 3))
    for seed in range(size()):
        assert_same_bits(everyone[seed], make(torch.float32, seed))
        assert_same_bits(outputs[seed], make(torch.float32, seed, seed + 3))
    gathered = [torch.empty(61) for _ in range(size())] if rank() == 0 else None
    dist.gather(make(torch.float32, rank()), gathered, dst=0)
    back = torch.empty(61)
    dist.scatter(back, gathered, src=0)
    assert_same_bits(back, make(torch.float32, rank()))
    rows = torch.arange(5.0 * size()) + 100 * rank()
    received = torch.empty(5 * size())
    dist.all_to_all_single(received, rows)
    assert received.view(-1, 5)[:, 0].tolist() == [5.0 * rank() + 100 * s for s in range(size())]


@pytest.mark.mpi(min_size=2)
def test_messages() -> None:
    received = torch.empty(61)
    sending = dist.isend(make(torch.float32, rank()), (rank() + 1) % size())
    dist.recv(received, (rank() - 1) % size())
    sending.wait()
    assert_same_bits(received, make(torch.float32, (rank() - 1) % size()))


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
@pytest.mark.timeout(300)
def test_true_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^31 + 5 elements, as they are: 2 GiB a tensor, so on two ranks only."""
    monkeypatch.undo()
    part = dist.new_group([0, 1])
    if rank() < 2:
        count = 2**31 + 5
        tensor = torch.zeros(count, dtype=torch.uint8)
        tensor[-1] = tensor[0] = rank() + 1
        dist.broadcast(tensor, 1, group=part)
        assert tensor[0] == tensor[-1] == 2
        dist.all_reduce(tensor, op=dist.ReduceOp.BOR, group=part)
        assert tensor[0] == tensor[-1] == 2
        if rank() == 0:
            tensor[-2] = 7
            dist.send(tensor, 1, group=part)
        else:
            dist.recv(tensor, 0, group=part)
            assert tensor[-2] == 7
        dist.destroy_process_group(part)
    dist.barrier()

"""Large collectives that read the other ranks' memory: who gives up, what cannot be read, who may.

What they give, test_in_memory says, which runs both ways.
"""

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import mpirun
import numpy as np
import pytest
import torch
import torch.distributed as dist
from group_data import rank, size

pytestmark = [pytest.mark.timeout(120)]
ranks = pytest.mark.mpi(min_size=2)

# Elements of odd numbers of bytes, and some that make more pieces than ranks.
COUNTS = (1, 77, 4099, 70_001, 600_011)


def always(part: Any) -> Any:
    """Let all collectives of a group read the other ranks' memory."""
    if part.state.memory is None or not part.state.memory.reads_directly:
        pytest.skip("the ranks may not read each other's memory")
    part.state.memory.read_directly(1, 1, 1)
    return part


@pytest.fixture
def part() -> Any:
    """A group of its own with a short time limit."""
    made: Any = dist.new_group(timeout=timedelta(seconds=2))
    return always(made)


def values(count: int, of: int) -> torch.Tensor:
    return torch.arange(count).mul(37 + of).add(of).remainder(251).to(torch.uint8)


@ranks
@pytest.mark.parametrize("count", COUNTS)
def test_what_is_moved_has_the_same_bits(count: int, part: Any) -> None:
    own, sent, every = values(count, rank()), values(count, rank()), range(size())
    gathered, exchanged = torch.empty_like(own).repeat(2, size()).unbind()
    works: list[Any] = [
        part.all_gather_single(gathered, own),
        dist.all_to_all_single(
            exchanged, torch.cat([values(count, rank() + 10 * to) for to in every]), group=part,
            async_op=True,
        ),
        dist.broadcast(sent, group=part, group_src=size() - 1, async_op=True),
    ]  # fmt: skip
    for work in works:
        work.wait()
    assert torch.equal(gathered, torch.cat([values(count, of) for of in every]))
    assert torch.equal(exchanged, torch.cat([values(count, of + 10 * rank()) for of in every]))
    assert torch.equal(sent, values(count, size() - 1))


def _all_reduce(own: torch.Tensor, op: Any, part: Any) -> torch.Tensor:
    dist.all_reduce(own, op, part)
    return own


def _reduce(own: torch.Tensor, op: Any, part: Any) -> torch.Tensor:
    dist.reduce(own, group=part, op=op, group_dst=1)
    return own if rank() == 1 else own[:0]


def _reduce_scatter(own: torch.Tensor, op: Any, part: Any) -> torch.Tensor:
    out = torch.empty(own.numel() // size(), dtype=own.dtype)
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    part.reduce_scatter_single(out, own[: out.numel() * size()], options).wait()
    return out


@ranks
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int16], ids=str
)
@pytest.mark.parametrize("call", [_all_reduce, _reduce, _reduce_scatter])
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX], ids=str)
def test_sums_have_the_bits_of_copied_ones(
    dtype: torch.dtype, call: Callable[..., torch.Tensor], op: Any, part: Any
) -> None:
    generator = torch.Generator().manual_seed(rank())
    for count in COUNTS:
        own = torch.randn(count, generator=generator).mul(100).to(dtype)
        results = []
        for way in ((0, 0, 0), (1, 1, 1)):
            part.state.memory.read_directly(*way)
            results.append(call(own.clone(), op, part).view(torch.uint8))
        assert torch.equal(*results)


@ranks
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["all_gather", "reduce"])
def test_ranks_that_have_given_up_are_left_alone(name: str, part: Any) -> None:
    """The last rank is stopped when it has begun, and goes on when the others have given up.

    Then their tensors are their programs' again: it takes nothing of them for a result, and writes
    nothing there.
    """
    last = size() - 1
    processes = [0] * size()
    dist.all_gather_object(processes, os.getpid())
    tensor = torch.full((2_000_000,), float(rank()))
    gathered = torch.empty(size() * tensor.numel())
    if rank() != last:
        time.sleep(0.5)
    if name == "reduce":
        work: Any = dist.reduce(tensor, group=part, group_dst=0, async_op=True)
    else:
        work = part.all_gather_single(gathered, tensor)
    if rank() == last:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=name):
        work.wait()
    tensor.fill_(-1.0)
    if rank() == 0:
        time.sleep(0.5)  # until all have given up
        os.kill(processes[last], signal.SIGCONT)
    dist.barrier()
    assert (tensor == -1.0).all()


class _Hidden:
    """A tensor of which neither this process nor the kernel may read the first `count` elements."""

    def __init__(self, count: int, whole: int) -> None:
        self.mapping = mmap.mmap(-1, 4 * whole)
        self.array = np.frombuffer(self.mapping, dtype=np.float32)
        self.tensor = torch.from_numpy(self.array)
        self.size = 4 * count
        self.protect(0)

    def protect(self, access: int) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self.array.ctypes.data)
        assert library.mprotect(address, ctypes.c_size_t(self.size), access) == 0


@ranks
def test_memory_that_cannot_be_read_is_an_error(part: Any) -> None:
    """The group is broken on all ranks, which say why; a new one works."""
    count = 1 << 20
    hidden = _Hidden(count, size() * count) if rank() == 0 else None
    output = torch.zeros(size() * count) if hidden is None else hidden.tensor

    def twice() -> None:
        """The first rank has read all that it needs, and hears of it in the next one."""
        for _ in range(2):
            part.all_gather_single(output, output[rank() * count :][:count]).wait()

    with pytest.raises(RuntimeError, match="set MPIDDP_COLLECTIVES=copies"):
        twice()
    if hidden is not None:
        hidden.protect(3)
    dist.barrier()
    total = torch.full((count,), float(rank()))
    dist.all_reduce(total, group=always(dist.new_group()))
    assert (total == sum(range(size()))).all()


@pytest.mark.mpi(min_size=3)
def test_late_ranks_of_a_broadcast_hold_nobody_up(part: Any) -> None:
    """The root writes to those that have come, and others read by themselves."""
    for late in range(1, size()):
        dist.barrier()
        tensor = torch.full((1_000_000,), float(rank()))
        if rank() == late:
            time.sleep(0.8)
        began = time.monotonic()
        dist.broadcast(tensor, group=part, group_src=0)
        took = time.monotonic() - began
        assert (tensor == 0).all()
        assert took < 0.6 or rank() == 0  # its tensor is being read until all have come


@ranks
def test_copies_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_COLLECTIVES", "copies")
    made: Any = dist.new_group()
    if made.state.memory is None:
        pytest.skip("the ranks share no memory")
    assert not made.state.memory.reads_directly
    tensor = torch.full((1_000_000,), float(rank()))
    dist.all_reduce(tensor, group=made)
    assert (tensor == sum(range(size()))).all()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_may_not_read() -> None:
    """Where one rank may not read another one's memory, no rank does."""
    script = Path(__file__).parents[1] / "scripts" / "readable_ranks.py"
    done = mpirun.run(2, [script], timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = (line.split() for line in done.stdout.splitlines())
    assert first == second
    assert first[1] == "False"

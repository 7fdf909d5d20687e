"""The transport inside a node: the memory that ranks share, who reduces, how they wait."""

import gc
import os
import resource
import time
from pathlib import Path

import mpirun
import pytest
import torch
import torch.distributed as dist
from models import mlp
from replicas import RANK, SIZE, assert_replicated, bits, together
from torch import nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.engine.single_all_reduce import SingleAllReduce
from mpiddp.transports.shared_broadcast import SharedBroadcast

pytestmark = pytest.mark.sizes
several = pytest.mark.mpi(min_size=2)
anywhere = pytest.mark.mpi


def descriptors() -> set[str]:
    return {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()}


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:mpiddp")


@several
class TestMemory:
    @pytest.mark.essential
    def test_every_rank_sees_every_piece(self) -> None:
        from mpi4py import MPI

        from mpiddp.transports.shared_memory import allocate

        pieces = [memoryview(piece) for piece in allocate(MPI.COMM_WORLD, 4097)]
        assert [len(piece) for piece in pieces] == [4097] * SIZE
        assert not any(any(piece) for piece in pieces) or RANK > 0
        MPI.COMM_WORLD.Barrier()
        pieces[RANK][4096] = 10 + RANK
        MPI.COMM_WORLD.Barrier()
        assert [piece[4096] for piece in pieces] == [10 + rank for rank in range(SIZE)]

    @pytest.mark.thorough
    @pytest.mark.essential
    def test_nothing_is_left(self) -> None:
        from mpi4py import MPI

        from mpiddp.transports.shared_memory import allocate

        gc.collect()
        before = descriptors(), mappings()
        pieces = allocate(MPI.COMM_WORLD, 1)
        # Of this rank's own piece, for the children that it may fork.
        assert descriptors() == before[0] | {"/memfd:mpiddp (deleted)"}
        assert mappings() == before[1] + SIZE
        del pieces
        assert (descriptors(), mappings()) == before

    @pytest.mark.skipif(
        not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without them"
    )
    def test_large_pages_are_asked_for(self) -> None:
        from mpi4py import MPI

        from mpiddp.transports.shared_memory import allocate

        small, large = (allocate(MPI.COMM_WORLD, size) for size in (1 << 20, 1 << 21))
        asked = Path("/proc/self/smaps").read_text().count(" hg")
        del small, large
        assert asked - Path("/proc/self/smaps").read_text().count(" hg") == SIZE

    def test_different_sizes_are_refused(self) -> None:
        from mpi4py import MPI

        from mpiddp.transports.shared_memory import allocate

        with pytest.raises(OSError, match="different sizes"):
            allocate(MPI.COMM_WORLD, 100 + (RANK == 1))

    def test_too_little_memory_on_one_rank_is_an_error_on_all(self) -> None:
        from mpi4py import MPI

        from mpiddp.transports.shared_memory import allocate

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = descriptors(), mappings()
        if RANK == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(OSError, match="cannot make 5000 bytes"):
                allocate(MPI.COMM_WORLD, 5000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (descriptors(), mappings()) == before

    @pytest.mark.thorough
    def test_gradients_outlive_their_model(self) -> None:
        DDP(nn.Linear(1, 1), transport="shared")  # has the memory made that groups keep
        gc.collect()
        before = mappings()
        model = nn.Linear(3, 2)
        wrapped = DDP(model, gradient_as_bucket_view=True, transport="shared")
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(torch.full((1, 3), float(RANK))).sum().backward()
        gradient = model.weight.grad
        assert gradient is not None
        del model, wrapped
        gc.collect()
        dist.barrier()
        gradient += 1
        dist.barrier()
        assert gradient.unique().tolist() == [1 + (SIZE - 1) / 2]
        assert before < mappings()
        del gradient
        gc.collect()
        # The channel and its bell stay for the next model.
        assert mappings() <= before + SIZE


@several
class TestSums:
    @pytest.mark.essential(keep=3)
    @pytest.mark.smoke(keep=1)
    @pytest.mark.parametrize(
        "dtype",
        [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64],
        ids=str,
    )
    @pytest.mark.parametrize("elements", [1, 31, 40_000, 1_000_003])
    def test_same_as_mpi(self, dtype: torch.dtype, elements: int) -> None:
        """Small whole numbers, whose sum is exact in any order."""
        gradients = []
        for transport in ("shared", "mpi"):
            model = nn.ParameterList([torch.zeros(elements, dtype=dtype)])
            wrapped = DDP(Together(model), transport=transport)
            for step in range(3):
                wrapped.zero_grad()
                given = torch.arange(elements) % 13 + RANK * (step + 1)
                wrapped().backward(given.to(dtype))
            assert model[0].grad is not None
            gradients.append(model[0].grad)
        with together():
            assert torch.equal(*gradients)

    def test_order_of_the_sum_is_the_order_of_ranks(self) -> None:
        values = [0.1, 1e8, -1e8, 3.7][:SIZE]
        model = nn.ParameterList([torch.zeros(100_000)])
        wrapped = DDP(Together(model), transport="shared")
        for _ in range(3):
            wrapped.zero_grad()
            wrapped().backward(torch.full((100_000,), values[RANK]))
        total = torch.tensor(values[0])
        for value in values[1:]:
            total = total + torch.tensor(value)
        assert model[0].grad is not None
        with together():
            assert model[0].grad.unique().tolist() == [(total / SIZE).item()]

    def test_late_ranks(self) -> None:
        """Whoever is late in whatever backward, all hold the same bits."""
        model = mlp(6, 400, 3)
        wrapped = DDP(model, bucket_cap_mb=0.1, gradient_as_bucket_view=True, transport="shared")
        for step in range(2 * SIZE):
            wrapped.zero_grad()
            loss = wrapped(torch.randn(4, 6, dtype=torch.float64)).square().sum()
            if step % SIZE == RANK:
                time.sleep(0.05)
            loss.backward()
            assert_replicated(wrapped)


class Together(nn.Module):
    """One parameter, handed out as it is."""

    def __init__(self, parameters: nn.ParameterList) -> None:
        super().__init__()
        self.parameters_given = parameters

    def forward(self) -> torch.Tensor:
        parameter: torch.Tensor = self.parameters_given[0]
        return parameter.view_as(parameter)


@several
def test_waiting_costs_no_processor_time() -> None:
    """A rank that waits for a late one sleeps."""
    model = nn.Linear(4, 4)
    wrapped = DDP(model, transport="shared")
    wrapped(torch.ones(1, 4)).sum().backward()
    loss = wrapped(torch.ones(1, 4)).sum()
    gc.collect()  # a full one takes long after thousands of tests
    dist.barrier()
    if RANK == 1:
        time.sleep(1)
    before = time.process_time()
    loss.backward()
    used = time.process_time() - before
    with together():
        assert used < 0.4
        assert bits(model.weight.grad)


def sleeps() -> int:
    """How often this thread has slept so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@several
def test_the_last_rank_reduces_one_chunk_at_once() -> None:
    """Before its next step, which may come late, and without waking anybody for it."""
    from mpi4py import MPI

    channel = DDP(nn.Linear(1, 1), transport="shared").reducer.channel
    memory = channel.allocate([1000])[0]
    reduction = SingleAllReduce(channel, memory, torch.float32, SIZE)
    values = memory.buffer.view(torch.float32)
    for last in range(SIZE):
        values.fill_(RANK)
        if last != RANK:
            reduction.submit()
        MPI.COMM_WORLD.Barrier()
        if last == RANK:
            reduction.submit()
        MPI.COMM_WORLD.Barrier()
        means = values.unique().tolist()
        assert reduction.wait(60)
        with together():
            assert means == [(SIZE - 1) / 2]


@pytest.mark.mpi(min_size=3)
def test_readers_of_a_broadcast_do_not_wake_each_other() -> None:
    from mpi4py import MPI

    shared = SharedBroadcast(MPI.COMM_WORLD, 8, crowded=True)
    counts = []
    for _ in range(10):
        before = sleeps()
        if RANK == 0:
            assert shared.begin(60)
            time.sleep(0.06)
            shared.publish()
        else:
            assert shared.wait(60)
            counts.append(sleeps() - before)
            time.sleep(0.02 * (RANK - 1))
            shared.consume()
    with together():
        assert RANK != 1 or min(counts[1:]) == 1, counts


@anywhere
class TestChoice:
    @pytest.mark.smoke
    def test_automatic_is_shared_memory_here(self) -> None:
        wrapped = DDP(nn.Linear(1, 1), transport="auto")
        transport = wrapped.reducer.channel.transport
        assert type(transport).__name__ == ("SharedTransport" if SIZE > 1 else "NoneType")

    def test_wrong_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match="must be one of auto, shared, exchange, mpi, not 'x'"):
            DDP(nn.Linear(1, 1), transport="x")
        monkeypatch.setenv("MPIDDP_TRANSPORT", "y")
        with pytest.raises(ValueError, match="MPIDDP_TRANSPORT must be auto, shared"):
            DDP(nn.Linear(1, 1))
        assert DDP(nn.Linear(1, 1), transport="mpi")

    @pytest.mark.essential
    @pytest.mark.mpi(min_size=2)
    def test_ranks_that_choose_differently(self) -> None:
        with pytest.raises(RuntimeError, match="transport"):
            DDP(nn.Linear(1, 1), transport="mpi" if RANK == 1 else "shared")


NO_MEMORY = """
import resource, sys, warnings
import torch, torch.distributed as dist
import mpiddp

mpiddp.init_process_group()
if dist.get_rank() == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    wrapped = mpiddp.DistributedDataParallel(torch.nn.Linear(2, 2))
wrapped(torch.full((1, 2), dist.get_rank() * 2.0)).sum().backward()
assert wrapped.module.weight.grad.unique().tolist() == [1.0]
messages = [str(each.message) for each in said if "share memory" in str(each.message)]
assert len(messages) == (dist.get_rank() == 0), messages
try:
    mpiddp.DistributedDataParallel(torch.nn.Linear(2, 2), transport="shared")
except OSError as error:
    assert "cannot make" in str(error)
    print("refused", flush=True)
"""


@pytest.mark.timeout(100)
def test_without_shared_memory_gradients_go_through_mpi(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NO_MEMORY)
    done = mpirun.run(2, [script], timeout=60, env={"MPIDDP_TRANSPORT": None})
    assert done.stdout.count("refused") == 2, done.stderr
    assert done.returncode == 0, done.stderr

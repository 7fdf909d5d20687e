"""Threads that help with copies and sums: the same bits, asleep otherwise, gone when told."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from replicas import RANK, SIZE, bits
from torch import nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.system import caches, copying, helpers
from mpiddp.transports import choice

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

MB = 1 << 20
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


@pytest.fixture(autouse=True)
def _as_before():
    before = helpers.allowed()
    yield
    copying.keep_in_cache(32 * MB)
    helpers.stop()
    helpers.allow(before)


def tasks() -> dict[str, int]:
    """Return the nanoseconds that each helper has run, by its number in Linux."""
    return {
        task.name: int((task / "schedstat").read_text().split()[0])
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text() == "mpiddp helper\n"
    }


def started(number: int) -> bool:
    """Whether there are so many helpers, some of which may have to begin first."""
    limit = time.monotonic() + 20
    while len(tasks()) != number and time.monotonic() < limit:
        time.sleep(1e-3)
    return len(tasks()) == number


def copies_are_right(size: int) -> bool:
    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    copying.copy_tensor(target, source)
    return torch.equal(target, source)


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("cached", [0, 1 << 40])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_copies_of_every_alignment(number: int, cached: int) -> None:
    helpers.allow(number)
    copying.keep_in_cache(cached)
    source = torch.randint(1, 256, (3 * MB,), dtype=torch.uint8)
    for size in (0, 1, 127, 128, 200, 262_143, 262_144, 262_145, MB, 2 * MB + 77):
        for first in (0, 1, 63):
            memory = torch.zeros(3 * MB, dtype=torch.uint8)
            part = memory[first : first + size]
            copying.copy_tensor(part, source[5 : 5 + size])
            assert torch.equal(part, source[5 : 5 + size])
            assert not memory[:first].any()
            assert not memory[first + size :].any()
    assert started(number)


@pytest.mark.parametrize("distance", [-100_000, 0, 100_000])
def test_copies_that_overlap(distance: int) -> None:
    helpers.allow(3)
    copying.keep_in_cache(0)
    memory = torch.randint(0, 256, (4 * MB,), dtype=torch.uint8)
    source, target = memory[MB : 3 * MB], memory[MB + distance : 3 * MB + distance]
    expected = source.clone()
    copying.copy_tensor(target, source)
    assert torch.equal(target, expected)


class Two(nn.Module):
    """Parameters of odd sizes whose gradients are what backward is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(1_100_001, dtype=dtype))
        self.small = nn.Parameter(torch.zeros(33, dtype=dtype))

    def forward(self) -> torch.Tensor:
        return torch.cat([self.large, self.small])


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("compression", [None, torch.bfloat16])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_with_and_without(
    dtype: torch.dtype, views: bool, compression: torch.dtype | None
) -> None:
    torch.manual_seed(RANK)
    gradient = torch.randn(1_100_034, dtype=dtype if dtype.is_complex else None).to(dtype)
    results = []
    for number, cached in ((0, 1 << 40), (3, 1 << 40), (3, 0)):
        model = Two(dtype)
        wrapped = DDP(model, gradient_as_bucket_view=views)
        if compression is not None and not dtype.is_complex:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
        helpers.allow(number)
        copying.keep_in_cache(cached)
        for _ in range(2):
            wrapped.zero_grad()
            if RANK == 0:
                time.sleep(0.02)  # the others wait, then all sum
            wrapped().backward(gradient)
        assert model.large.grad is not None
        assert model.small.grad is not None
        results.append([model.large.grad.clone(), model.small.grad.clone()])
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            assert bits(ours) == bits(theirs)
    if not dtype.is_complex and (not views or SIZE > 1):
        assert started(3)


class One(nn.Module):
    """One parameter: no sum begins before the last gradient, while backward still computes."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(1_100_001))

    def forward(self) -> torch.Tensor:
        return self.large


@pytest.mark.mpi(min_size=2)
def test_sums_are_shared() -> None:
    """With gradients in place, nothing is left to share but the sums."""
    model = One()
    wrapped = DDP(model, gradient_as_bucket_view=True)
    for _ in range(3):
        wrapped.zero_grad(set_to_none=False)
        wrapped().backward(torch.ones(1_100_001))
        helpers.allow(1)
        helpers.stop()  # what the first steps copied is over
    assert not tasks()
    for _ in range(20):
        wrapped.zero_grad(set_to_none=False)
        wrapped().backward(torch.full((1_100_001,), float(RANK)))
        assert model.large.grad is not None
        assert model.large.grad[-1] == (SIZE - 1) / 2
    assert dist.get_world_size() == SIZE
    assert started(1)


def test_asleep_while_backward_computes() -> None:
    helpers.allow(2)
    assert copies_are_right(4 * MB)
    assert started(2)
    time.sleep(0.2)
    before = tasks()
    layer = nn.Linear(256, 256)
    wrapped = DDP(layer)
    helpers.allow(2)
    for _ in range(30):
        wrapped(torch.randn(256, 256)).square().sum().backward()
    assert tasks() == before


def test_stopped_and_started_again() -> None:
    helpers.allow(2)
    assert copies_are_right(4 * MB)
    assert started(2)
    helpers.stop()
    helpers.stop()
    assert not tasks()
    assert copies_are_right(4 * MB)
    assert started(2)
    helpers.allow(1)
    assert copies_are_right(4 * MB)
    assert helpers.allowed() == 1


def test_several_threads_at_once() -> None:
    helpers.allow(2)
    wrong = []

    def copy_often(size: int) -> None:
        wrong.extend(number for number in range(30) if not copies_are_right(size))

    threads = [threading.Thread(target=copy_often, args=(2 * MB + k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.essential
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_none_in_a_forked_child() -> None:
    helpers.allow(2)
    assert copies_are_right(4 * MB)
    child = os.fork()
    if child == 0:
        source, target = torch.ones(4 * MB), torch.zeros(4 * MB)
        copying.copy_tensor(target, source)
        helpers.stop()
        os._exit(0 if torch.equal(target, source) and not (tasks() or helpers.allowed()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert copies_are_right(4 * MB)
    assert started(2)


@pytest.mark.parametrize(("cores", "threads", "expected"), [(4, 2, 1), (3, 2, 0), (8, 1, 0)])
def test_none_without_cores_for_them(cores: int, threads: int, expected: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert choice._allow_helpers([(set(range(cores)), threads)] * 2) == cores
    finally:
        torch.set_num_threads(before)
    assert helpers.allowed() == expected


def test_as_many_as_are_of_use() -> None:
    assert helpers.useful(0) == 0
    assert helpers.useful(1) == 1
    assert 0 <= helpers.useful(7) <= 7
    assert helpers.allowed() == 0


def test_share_of_the_cache(tmp_path: Path) -> None:
    for index, (level, size, sharing) in enumerate([(1, "32K", "0"), (3, "32768K", "0-3,8-11")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(f"{level}\n")
        (folder / "size").write_text(f"{size}\n")
        (folder / "shared_cpu_list").write_text(f"{sharing}\n")
    assert caches.share_of_cache(1, str(tmp_path)) == 4 * MB
    assert caches.share_of_cache(2, str(tmp_path)) == 8 * MB
    assert caches.share_of_cache(99, str(tmp_path)) == 32 * MB
    assert caches.share_of_cache(2, str(tmp_path / "nowhere")) == 2 * MB
    assert caches.share_of_cache(1) > 0

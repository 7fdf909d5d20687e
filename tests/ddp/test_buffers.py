"""Buffers are those of rank 0 at each forward call, unless that is switched off."""

import copy
import gc
import threading
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from models import mlp
from replicas import RANK, SIZE, all_bits, assert_close, assert_same_bits, gather, together
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch_versions import HAS_FORWARD_SYNC_BUFFERS

from mpiddp import DistributedDataParallel as DDP
from mpiddp.process_group.work import Work

pytestmark = pytest.mark.mpi

BUFFERS = {
    "of_int64": torch.tensor([1, 2**62]),
    "of_int8": torch.tensor([[-3]], dtype=torch.int8),
    "of_bool": torch.tensor([True, False, True]),
    "of_float16": torch.tensor([0.1, -2.0], dtype=torch.float16),
    "of_bfloat16": torch.tensor(0.3, dtype=torch.bfloat16),
    "of_float64": torch.randn(2, 3, 4, dtype=torch.float64).permute(2, 0, 1),
    "of_complex": torch.tensor([1 + 2j]),
    "of_empty": torch.zeros(0, 3),
}


class Recorder(nn.Module):
    """Notes the digests of the buffers that forward finds, then makes them the rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        for name, value in BUFFERS.items():
            self.register_buffer(name, value.clone())
        self.register_buffer("transient", torch.zeros(3), persistent=False)
        self.seen: list[dict[str, str]] = []

    def change(self, by: int) -> None:
        for buffer in self.buffers():
            if buffer.dtype is torch.bool:
                buffer.logical_xor_(torch.tensor([by % 2 == 1, True, by % 3 == 1]))
            else:
                buffer += by

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(all_bits(self.named_buffers()))
        self.change(RANK + 1)
        return (self.weight * x).sum()


@pytest.mark.thorough
@pytest.mark.mpi(min_size=2)
def test_messages_leave_no_memory_behind():
    def alive() -> int:
        gc.collect()
        return sum(type(each) is Work for each in gc.get_objects())

    model = Recorder()
    model.register_buffer("large", torch.zeros(1 << 20))  # what is small is done at once
    wrapped = DDP(model, transport="mpi")
    counts = []
    for _ in range(4):
        wrapped(torch.ones(2)).backward()
        counts.append(alive())
    assert counts == [counts[0]] * 4


@pytest.mark.smoke
def test_each_forward_begins_with_those_of_rank_0():
    model = Recorder()
    wrapped = DDP(model)
    for _ in range(3):
        wrapped(torch.ones(2)).backward()
    everyone = gather(model.seen)
    with together():
        assert all(seen == everyone[0] for seen in everyone)
        assert len(everyone[0]) == 3
        # Rank 0's own changes are in them.
        for earlier, later in zip(everyone[0], everyone[0][1:], strict=False):
            changed = {name for name in earlier if earlier[name] != later[name]}
            assert changed == earlier.keys() - {"of_empty"}


def test_first_forward_has_those_of_construction():
    model = Recorder()
    model.change(RANK)
    DDP(model, forward_sync_buffers=False)
    assert_same_bits(model.named_buffers())


@pytest.mark.mpi(min_size=2)
def test_not_synchronised_if_switched_off():
    model = Recorder()
    wrapped = DDP(model, forward_sync_buffers=False)
    for _ in range(3):
        wrapped(torch.ones(2)).backward()
    everyone = gather(model.seen)
    with together():
        assert all(seen[0] == everyone[0][0] for seen in everyone)
        for step in (1, 2):
            assert len({seen[step]["of_int64"] for seen in everyone}) == SIZE


def test_not_synchronised_under_no_sync():
    """The first forward under no_sync still synchronises, those after it do not."""
    model = Recorder()
    wrapped = DDP(model)
    with wrapped.no_sync():
        for _ in range(3):
            wrapped(torch.ones(2)).backward()
    wrapped(torch.ones(2)).backward()
    wrapped(torch.ones(2)).backward()
    everyone = gather([seen["of_int64"] for seen in model.seen])
    with together():
        equal = [len({seen[step] for seen in everyone}) == 1 for step in range(5)]
        assert equal == ([True, False, False, False, True] if SIZE > 1 else [True] * 5)


def test_deprecated_name():
    model = Recorder()
    with together():
        warns = pytest.warns(FutureWarning, match="forward_sync_buffers")
        with warns if HAS_FORWARD_SYNC_BUFFERS else nullcontext():
            wrapped = DDP(model, broadcast_buffers=False)
        assert not wrapped.forward_sync_buffers


@pytest.mark.essential
def test_running_statistics_of_batch_norm():
    """Each rank adds its own batch to the statistics of rank 0."""
    norm = nn.BatchNorm1d(3, dtype=torch.float64)
    wrapped = DDP(nn.Sequential(norm, nn.Linear(3, 2, dtype=torch.float64)))
    mean, variance = torch.zeros(3).double(), torch.ones(3).double()
    for step in range(4):
        batches = torch.randn(SIZE, 5, 3, dtype=torch.float64) + torch.arange(SIZE).view(-1, 1, 1)
        wrapped(batches[RANK]).sum().backward()
        own_mean = 0.9 * mean + 0.1 * batches[RANK].mean(0)
        own_variance = 0.9 * variance + 0.1 * batches[RANK].var(0)
        mean = 0.9 * mean + 0.1 * batches[0].mean(0)
        variance = 0.9 * variance + 0.1 * batches[0].var(0)
        with together():
            assert_close(norm.running_mean, own_mean, "running mean", 10)
            assert_close(norm.running_var, own_variance, "running variance", 10)
            assert int(norm.num_batches_tracked) == step + 1


def test_buffer_that_was_replaced():
    """A buffer assigned anew after construction is synchronised as well."""
    model = Recorder()
    wrapped = DDP(model)
    for step in range(2):
        model.of_int64 = torch.tensor([RANK + step, 7])
        wrapped(torch.ones(2)).backward()
    everyone = gather([seen["of_int64"] for seen in model.seen])
    with together():
        assert all(seen == everyone[0] for seen in everyone)


@pytest.mark.essential
def test_ignored_buffers_and_parameters():
    """What the user excluded is neither compared nor broadcast nor averaged."""
    model = mlp(3, 4, 2)
    model.register_buffer("own", torch.full((RANK + 1,), RANK))
    model[2].bias = nn.Parameter(torch.full((2,), float(RANK)).double())
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["own", "2.bias"])
    wrapped = DDP(model)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.full((2, 3), RANK + 1.0, dtype=torch.float64)).sum().mul(RANK + 1).backward()
    with together():
        assert model.own.tolist() == [RANK] * (RANK + 1)
        assert model[2].bias.tolist() == [RANK, RANK]
        assert model[2].bias.grad.tolist() == [2 * (RANK + 1)] * 2
    assert_same_bits([("weight", model[2].weight), ("gradient", model[2].weight.grad)])


def test_model_without_buffers():
    wrapped = DDP(mlp(3, 2))
    with together():
        for _ in range(2):
            wrapped(torch.ones(1, 3, dtype=torch.float64)).sum().backward()


def test_two_forwards_before_a_backward():
    """Buffers that are equal already are not written: autograd has saved them."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    wrapped = DDP(model)
    inputs = torch.randn(2, 3)
    (wrapped(inputs) + wrapped(2 * inputs)).square().sum().backward()
    assert model[0].weight.grad is not None
    assert_same_bits([("gradient", model[0].weight.grad)])


def test_buffers_of_growing_sizes():
    """A later module with more buffers gets more memory, an earlier one still works."""
    wrapped = []
    for size in (3, 300, 70_000):
        model = nn.Linear(1, 1)
        model.register_buffer("table", torch.full((size,), float(RANK)))
        model.register_buffer("odd", torch.full((3, 5), float(RANK)).t())
        wrapped.append(DDP(model))
    for step in range(3):
        for each in wrapped:
            for buffer in each.module.buffers():
                buffer.fill_(RANK + step)
            each(torch.ones(1, 1)).sum().backward()
            with together():
                for buffer in each.module.buffers():
                    assert buffer.unique().tolist() == [step]


@pytest.mark.mpi(min_size=2)
def test_rank_0_runs_ahead():
    """It may be one forward ahead of the others, and no further."""
    model = nn.Linear(1, 1)
    model.register_buffer("table", torch.zeros(1000))
    wrapped = DDP(model)
    for step in range(6):
        if RANK > 0:
            time.sleep(0.01)
        model.table.fill_(step if RANK == 0 else -1)
        wrapped(torch.ones(1, 1))
        assert model.table.unique().tolist() == [step]


class TestBufferHook:
    """`_register_buffer_comm_hook`: the user's own way to synchronise buffers."""

    @pytest.mark.essential
    @pytest.mark.parametrize(
        ("location", "returns"),
        [  # Futures that nobody waits for before forward are of no use there.
            (_BufferCommHookLocation.PRE_FORWARD, "nothing"),
            (_BufferCommHookLocation.POST_FORWARD, "nothing"),
            (_BufferCommHookLocation.POST_FORWARD, "futures"),
        ],
    )
    def test_as_torch(self, location, returns, gloo):
        def add_up(group, buffers):
            assert set(buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
            works = [dist.all_reduce(b, group=group, async_op=True) for b in buffers.values()]
            if returns == "futures":
                return [work.get_future() for work in works]
            for work in works:
                work.wait()
            return None

        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        ours = DDP(copy.deepcopy(module))
        theirs = TorchDDP(module, process_group=gloo)
        ours._register_buffer_comm_hook(None, add_up, location)
        theirs._register_buffer_comm_hook(gloo, add_up, location)
        for _ in range(3):
            batch = torch.randn(5, 3) + RANK
            for model in (ours, theirs):
                model.zero_grad()
                model(batch).square().sum().backward()
            with together():
                for name, buffer in ours.named_buffers():
                    assert_close(buffer.double(), theirs.get_buffer(name).double(), name, 1e7)

    def test_backward_waits_for_the_futures(self):
        """Also for those of several forwards; and an error in one is backward's."""
        waited: list[int] = []

        def later(state, buffers):
            future: torch.futures.Future[None] = torch.futures.Future()
            threading.Timer(0.05, lambda: (waited.append(1), future.set_result(None))).start()
            return [future]

        wrapped = DDP(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
        wrapped._register_buffer_comm_hook(None, later, _BufferCommHookLocation.POST_FORWARD)
        losses = [wrapped(torch.randn(4, 3)).sum() for _ in range(2)]
        sum(losses).backward()
        with together():
            assert waited == [1, 1]

        def fail(state, buffers):
            future: torch.futures.Future[None] = torch.futures.Future()
            future.set_exception(ValueError("broken on purpose"))
            return [future]

        wrapped._register_buffer_comm_hook(None, fail, _BufferCommHookLocation.POST_FORWARD)
        loss = wrapped(torch.randn(4, 3)).sum()
        with together(), pytest.raises(ValueError, match="broken on purpose"):
            loss.backward()

    def test_future_that_never_completes(self):
        group = dist.new_group()
        wrapped = DDP(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), process_group=group)
        wrapped._register_buffer_comm_hook(None, lambda *_: [torch.futures.Future()])
        loss = wrapped(torch.randn(4, 3)).sum()
        group.set_timeout(timedelta(seconds=0.5))
        with together(), pytest.raises(RuntimeError, match=r"hook of the buffers .* within 0.5 s"):
            loss.backward()
        dist.destroy_process_group(group)

    def test_not_callable(self):
        with together(), pytest.raises(AssertionError, match="hook must be callable"):
            DDP(nn.Linear(3, 2))._register_buffer_comm_hook(None, 3)

"""Modules on a GPU, on a simulated one: CPU tensors that go the whole way of a GPU's.

Our class with and without it, and torch's class over Gloo, are trained side by side in the same
process. What depends on real kernels is in test_gpu.py; `--simulated-gpu` lets other tests go
this way as well.
"""

import contextlib
import copy
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from models import CASES, GivenGradients, Tied, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    STEPS,
    all_bits,
    assert_gradients_close,
    assert_replicated,
    assert_same_bits,
    call_behind_wrapper,
    gradients_of,
    mean_by_hook,
    mean_of_ranks,
    share,
    together,
)
from simulated_gpu import SimulatedRuntime, on_cpu_tensors
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from mpiddp import DistributedDataParallel as DDP
from mpiddp import compression
from mpiddp.gpu.runtime import GpuError, register
from mpiddp.reducer.assignment import BucketAssignment

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.once,
    pytest.mark.simulated_gpu,
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides"),
]

SMALL_BUCKETS = 0.0005
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu(world: None) -> Iterator[SimulatedRuntime]:
    """Let CPU tensors be on the simulated GPU."""
    with on_cpu_tensors() as simulated:
        yield simulated


def on_host(module: nn.Module, **options: object) -> DDP:
    """Wrap a copy of a module that stays on the CPU."""
    before = register("cpu", None)
    try:
        return DDP(copy.deepcopy(module), **options)
    finally:
        register("cpu", before)


def on_gpu(module: nn.Module, **options: object) -> DDP:
    """Wrap a copy of a module that is on the simulated GPU."""
    wrapped = DDP(copy.deepcopy(module), **options)
    assert all(bucket.on_gpu or bucket.sparse for bucket in wrapped.reducer.buckets)
    return wrapped


def assert_same_gradients(ours: DDP, others: DDP) -> None:
    """Assert the very same bits."""
    with together():
        assert all_bits(gradients_of(ours).items()) == all_bits(gradients_of(others).items())


# What the wrapper does, beside the host's path and torch's.


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("case", CASES)
def test_training(case, views, gloo, gpu):
    module = CASES[case].make()
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": SMALL_BUCKETS}
    models = [
        on_gpu(module, **options),
        on_host(module, **options),
        TorchDDP(copy.deepcopy(module), process_group=gloo, **options),
    ]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5) for model in models]
    before = gpu.counts.copies_to_device
    for step in range(STEPS):
        batch = share(CASES[case].batch(2 * SIZE))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=step != 1)
            loss_of(model, batch).backward()
        assert_same_gradients(models[0], models[1])
        with together():
            rounding = CASES[case].rounding
            assert_gradients_close(gradients_of(models[0]), gradients_of(models[2]), 2, rounding)
        for optimizer in optimizers:
            optimizer.step()
        assert_replicated(models[0])
    with together():
        assert gpu.counts.copies_to_device > before


def test_accumulation(views):
    module = mlp(3, 4, 2)
    pair = [wrap(module, gradient_as_bucket_view=views) for wrap in (on_gpu, on_host)]
    for step in range(6):
        batch = torch.randn(2, 3, dtype=torch.float64) + RANK
        for model in pair:
            with contextlib.nullcontext() if step % 3 == 2 else model.no_sync():
                loss_of(model, batch).backward()
        assert_same_gradients(*pair)


def test_parameters_unused_in_turn(views, gloo):
    names = ["a", "b", "c", "d"]
    module = GivenGradients(**{name: torch.zeros(3) for name in names})
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    models = [
        on_gpu(module, **options),
        on_host(module, **options),
        TorchDDP(copy.deepcopy(module), process_group=gloo, **options),
    ]
    generator = torch.Generator().manual_seed(3)
    for step in range(6):
        used = torch.rand(SIZE, 4, generator=generator) < 0.4
        used[:, 0] = True
        if step < 2:
            used[:, 3] = False
        given = {
            name: torch.randn(3) + RANK for column, name in enumerate(names) if used[RANK, column]
        }
        for model in models:
            if step % 2:  # who is unused everywhere must keep old gradients
                model.zero_grad()
            model(given).backward()
        assert_same_gradients(models[0], models[1])
        with together():
            assert_gradients_close(gradients_of(models[0]), gradients_of(models[2]))


class _Checkpointed(nn.Module):
    """Uses a layer in several reentrant checkpoints, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp(3, 3)
        self.idle = mlp(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(self.layer, x, use_reentrant=True).tanh()
        return x


def test_static_graph(views):
    options = {"static_graph": True, "gradient_as_bucket_view": views}
    pair = [wrap(_Checkpointed(), **options) for wrap in (on_gpu, on_host)]
    pair[1].load_state_dict(pair[0].state_dict())
    for _ in range(4):
        x = (torch.randn(2, 3, dtype=torch.float64) + RANK).requires_grad_()
        for model in pair:
            model.zero_grad()
            loss_of(model, x).backward()
        assert_same_gradients(*pair)


@pytest.mark.parametrize("static", [False, True], ids=["found", "static"])
def test_skipped_buckets(static, views):
    options = {
        "skip_all_reduce_unused_params": True,
        "static_graph" if static else "find_unused_parameters": True,
        "bucket_cap_mb": 1e-4,
        "gradient_as_bucket_view": views,
    }
    module = GivenGradients(**{name: torch.zeros(30) for name in "abc"})
    pair = [wrap(module, **options) for wrap in (on_gpu, on_host)]
    for _ in range(STEPS):
        given = {"a": torch.randn(30), "c": torch.randn(30) + RANK}
        for model in pair:
            model.zero_grad()
            model(given).backward()
        assert_same_gradients(*pair)
    with together():
        assert sum(bucket.skipped for bucket in pair[0].reducer.buckets) == 1


@pytest.mark.filterwarnings("ignore:Detected uneven input skew")
def test_join(views):
    """Buffers too: the simulated GPU's tensors are the process group's."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    pair = [wrap(module, gradient_as_bucket_view=views) for wrap in (on_gpu, on_host)]
    batches = [torch.randn(5, 3) + RANK for _ in range(1 + SIZE - RANK)]
    for model in pair:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for batch in batches:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
    with together():
        ours, others = (all_bits(model.state_dict().items()) for model in pair)
        assert ours == others
    assert_same_bits(pair[0].state_dict().items())


def test_join_with_a_hook(views):
    pair = [wrap(mlp(3, 4, 2), gradient_as_bucket_view=views) for wrap in (on_gpu, on_host)]
    pair[1].load_state_dict(pair[0].state_dict())
    batches = torch.randn(1 + RANK, 2, 3, dtype=torch.float64) + RANK
    for model in pair:
        model.register_comm_hook(None, mean_by_hook)
        with model.join():
            for x in batches:
                loss_of(model, x).backward()
    with together():
        assert_gradients_close(*map(gradients_of, pair))


def _mean_in_place(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average in the bucket, after changing its size and back."""
    buffer = bucket.buffer()
    kept = buffer.clone()
    buffer.resize_(2 * len(kept)).resize_(len(kept)).copy_(kept)
    for gradient in bucket.gradients():
        gradient.div_(SIZE)
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.parametrize("hook", [mean_by_hook, _mean_in_place])
@pytest.mark.parametrize("case", ["mlp", "odd layouts", "channels_last"])
def test_hooks_in_python(hook, case, views):
    module = CASES[case].make()
    wrapped = on_gpu(module, gradient_as_bucket_view=views, bucket_cap_mb=SMALL_BUCKETS)
    wrapped.register_comm_hook(None, hook)
    module = wrapped.module
    for _ in range(STEPS):
        batch = CASES[case].batch(2 * SIZE)

        def loss(model: nn.Module, rank: int, batch: Tensor = batch) -> Tensor:
            return loss_of(model, share(batch, rank))

        expected = mean_of_ranks(module, loss)
        wrapped.zero_grad()
        loss(wrapped, RANK).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), expected, 2)
        assert_replicated(wrapped)


@pytest.mark.parametrize("hook", [compression.fp16, compression.bf16])
def test_compression(hook, views):
    """The same bits as the host's kernels make, of float32."""
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": SMALL_BUCKETS}
    pair = [wrap(CASES["channels_last"].make(), **options) for wrap in (on_gpu, on_host)]
    pair[1].load_state_dict(pair[0].state_dict())
    for model in pair:
        model.register_comm_hook(None, hook)
    for step in range(STEPS):
        batch = share(CASES["channels_last"].batch(2 * SIZE))
        for model in pair:
            model.zero_grad(set_to_none=step != 1)
            loss_of(model, batch).backward()
        assert_same_gradients(*pair)
    with together():
        assert all(bucket.buffer.dtype.itemsize == 2 for bucket in pair[0].reducer.buckets), (
            "something travelled wide"
        )


def test_sparse_gradients(views):
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4, sparse=True)
            self.dense = nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            y: Tensor = self.dense(self.words(tokens))
            return y

    pair = [wrap(Words(), gradient_as_bucket_view=views) for wrap in (on_gpu, on_host)]
    pair[1].load_state_dict(pair[0].state_dict())
    for step in range(STEPS):
        for model in pair:
            model.zero_grad()
            loss_of(model, torch.tensor([[RANK, RANK, 8], [step, 1, 2]])).backward()
        assert_same_gradients(*pair)


def test_delayed_parameters(views):
    module = mlp(3, 4, 2, dtype=torch.float32)
    parameters = dict(module.named_parameters())
    wrapped = DDP(
        module,
        gradient_as_bucket_view=views,
        delay_all_reduce_named_params=[("2.weight", parameters["2.weight"])],
        param_to_hook_all_reduce=parameters["0.bias"],
    )

    def loss(model: nn.Module, rank: int) -> Tensor:
        return loss_of(model, torch.linspace(-1, 1, 6).view(2, 3) + rank)

    for _ in range(STEPS):
        expected = mean_of_ranks(module, loss)
        wrapped.zero_grad()
        loss(wrapped, RANK).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), expected)


def test_another_process_group(views):
    """Buckets of another group's channels; gradients that were views stay what they are."""
    pair = [wrap(mlp(3, 4, 2), gradient_as_bucket_view=views) for wrap in (on_gpu, on_host)]
    pair[1].load_state_dict(pair[0].state_dict())
    new_group = dist.new_group()
    for step in range(4):
        x = torch.randn(2, 3, dtype=torch.float64) + RANK
        for model in pair:
            loss_of(model, x).backward()
            if step == 1 and model is pair[0]:
                model._update_process_group(new_group)
        assert_same_gradients(*pair)


@pytest.mark.mpi(min_size=1)
def test_world_of_one(views):
    """And larger ones: means over all ranks, on any number of them."""
    module = Tied()
    wrapped = on_gpu(module, gradient_as_bucket_view=views)

    def loss(model: nn.Module, rank: int) -> Tensor:
        return loss_of(model, torch.tensor([[rank, 3, 5]]))

    for _ in range(STEPS):
        expected = mean_of_ranks(wrapped.module, loss)
        wrapped.zero_grad()
        loss(wrapped, RANK).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), expected)


# Memory.


def _watch_gradients(module: nn.Module) -> list[weakref.ref[Tensor]]:
    """Return a list that gets a reference to each gradient, before a wrapper sees it."""
    seen: list[weakref.ref[Tensor]] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(weakref.ref(p.grad)))
    return seen


def test_views_are_in_the_bucket_and_gradients_gone():
    """With views a step holds no other gradients than the buckets."""
    module = mlp(30, 40, 20)
    seen = _watch_gradients(module)
    wrapped = DDP(module, gradient_as_bucket_view=True)
    for _ in range(STEPS):
        wrapped.zero_grad()
        loss_of(wrapped, torch.randn(2, 30, dtype=torch.float64)).backward()
    with together():
        assert len(seen) == 4 * STEPS
        assert not any(reference() is not None for reference in seen)
        (bucket,) = wrapped.reducer.buckets
        memory = bucket.memory.buffer.untyped_storage().data_ptr()
        for parameter in wrapped.parameters():
            assert parameter.grad.untyped_storage().data_ptr() == memory


def test_large_gradients_go_before_the_bucket_is_full():
    """Gradients that become views are not gathered without end."""
    module = GivenGradients(**{name: torch.zeros(1 << 20) for name in "abcd"})  # of 4 MiB each
    alive = _watch_gradients(module)
    wrapped = DDP(module, gradient_as_bucket_view=True, bucket_cap_mb=100)
    most = 0

    def count(parameter: Tensor) -> None:
        nonlocal most
        most = max(most, sum(reference() is not None for reference in alive))

    nodes = [call_behind_wrapper(parameter, count) for parameter in wrapped.parameters()]
    wrapped({name: torch.ones(1 << 20) for name in "abcd"}).backward()
    with together():
        assert len(wrapped.reducer.buckets) == 1
        assert most <= 1
        assert len(nodes) == 4


# Mixed precision, and several devices.


class _NoStream:
    """Stands for torch's streams and events, which a torch without GPUs cannot make."""

    waits = 0

    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        self.waits += 1

    def record(self) -> None:
        pass

    def wait(self, stream: object) -> None:
        pass


@pytest.mark.parametrize("reduced_as", [None, torch.float16, torch.float32], ids=str)
def test_mixed_precision(reduced_as, views, gloo, monkeypatch):
    """The mean that float32 gives, but for rounding, and of torch's class the very same.

    But in its first step, and with views, where torch's class reads memory at random.
    """
    current = _NoStream()
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch, name, _NoStream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: current)
    config = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=reduced_as)
    module = mlp(3, 4, 2, dtype=torch.float32)
    options = {
        "mixed_precision": config,
        "gradient_as_bucket_view": views,
        "bucket_cap_mb": SMALL_BUCKETS,
    }
    pair = [
        on_gpu(module, **options),
        TorchDDP(copy.deepcopy(module), process_group=gloo, **options),
    ]
    for step in range(4):
        batch = torch.randn(2 * SIZE, 3)

        def loss(model: nn.Module, rank: int, batch: Tensor = batch) -> Tensor:
            return loss_of(model, share(batch, rank))

        expected = mean_of_ranks(module, loss)
        for model in pair:
            model.zero_grad(set_to_none=step != 2)
            loss(model, RANK).backward()
        with together():
            # float32 sums keep what float16 would round.
            rounding = 1e-3 if reduced_as is not torch.float32 else 0
            if step > 0 and not views:
                assert_gradients_close(*map(gradients_of, pair), 2, rounding)
            assert_gradients_close(gradients_of(pair[0]), expected, rounding=0.02)
            assert {p.dtype for p in pair[0].parameters()} == {torch.float32}
        assert_same_bits(gradients_of(pair[0]).items())
    with together():
        # The stream of backward has waited for that of the hook before each bucket was read, and
        # once a step at torch's own call, which comes too late for that.
        assert current.waits > 2 * 4


def test_mixed_precision_of_a_copy(monkeypatch):
    """What is unpickled or copied has its reducer made anew."""
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch, name, _NoStream)
    monkeypatch.setattr(torch.accelerator, "current_stream", _NoStream)
    config = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    wrapped = DDP(mlp(3, 4, dtype=torch.float32), mixed_precision=config)
    wrapped._update_process_group(dist.group.WORLD)
    loss_of(wrapped, torch.randn(2, 3) + RANK).backward()
    assert_same_bits(gradients_of(wrapped).items())
    with together():
        assert wrapped.reducer.mixed_precision == (torch.float16, torch.float32)
        assert {p.grad.dtype for p in wrapped.parameters()} == {torch.float32}


class _OnSecond(nn.Parameter):
    """A parameter that says it is on another device than the rest; its gradient is not."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu", 0)


@pytest.mark.parametrize("small", [False, True], ids=["rebuilt", "from the start"])
def test_several_devices(small, views, gpu, monkeypatch):
    """Each has buckets and a channel of its own, and launches in one order."""
    monkeypatch.setattr(
        type(gpu), "index_of", lambda self, device: 0 if device.index is None else 1
    )
    gpu.set_devices(2)
    module = mlp(3, 4, 4, 2)
    for name in ("2.weight", "2.bias"):
        layer, _, kind = name.rpartition(".")
        setattr(module[int(layer)], kind, _OnSecond(module.get_parameter(name).detach()))
    # torch assigns by where the tensors really are: no bucket may hold two.
    wrapped = DDP(module, bucket_cap_mb=0, gradient_as_bucket_view=views)
    if small:
        wrapped.reducer._build_buckets([[index] for index in (5, 4, 3, 2, 1, 0)])
    x = torch.randn(2 * SIZE, 3, dtype=torch.float64)

    def loss(model: nn.Module, rank: int) -> Tensor:
        return loss_of(model, share(x, rank))

    for _ in range(STEPS):
        expected = mean_of_ranks(module, loss)
        wrapped.zero_grad()
        loss(wrapped, RANK).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), expected)
    with together():
        assert len(wrapped.reducer.channels) == 2
        channels = [bucket.channel.device.index for bucket in wrapped.reducer.buckets]
        assert channels == [None, None, 0, 0, None, None]


# Errors.


def test_a_copy_that_fails(gpu):
    """It is the rank's own error, and it names the call."""
    wrapped = on_gpu(mlp(3, 4, 2))
    loss = loss_of(wrapped, torch.randn(2, 3, dtype=torch.float64))
    refused = pytest.raises(GpuError, match="cudaMemcpyAsync")
    with together(), gpu.failing("MemcpyAsync"), refused:
        loss.backward()


def test_order_of_buckets_does_not_depend_on_devices():
    """What torch leaves in an order of its own is sorted by when it fills."""
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64]
    parameters = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in kinds]
    assignment = BucketAssignment(parameters, [False] * len(kinds), [1000], dist.group.WORLD)
    with together():
        assert assignment(None) == [[4], [3], [2], [1], [0]]
        assert assignment([2, 0, 1, 4, 3]) == [[2], [0], [1], [4], [3]]

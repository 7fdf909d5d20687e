"""Modules whose gradients are given to MPI as memory of the GPU, by "device" and by "ring".

Nobody divides what has been summed there: the bucket divides what it sends, by the divisor that
counts then. Ours are compared with torch's class over Gloo, or with means that are known. On the
simulated GPU; and, where `-m gpu` asks for it, on a real one.
"""

import contextlib
import copy
from collections.abc import Iterator

import gpus
import pytest
import torch
import torch.distributed as dist
from gpus import Gpu
from models import CASES, GivenGradients, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    STEPS,
    Gradients,
    assert_gradients_close,
    assert_same_bits,
    gradients_of,
    share,
    together,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP
from mpiddp import compression, settings
from mpiddp.transports import gpu_choice

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides"),
    pytest.mark.filterwarnings("ignore:Detected uneven input skew"),
]

SMALL_BUCKETS = 0.0005
TRANSPORTS = {"device": "GpuIallreduceTransport", "ring": "GpuRingTransport"}
PLACES = [
    pytest.param("simulated", marks=[pytest.mark.once, pytest.mark.simulated_gpu]),
    pytest.param("real", marks=pytest.mark.gpu),
]


@pytest.fixture(params=PLACES)
def gpu(request: pytest.FixtureRequest, world: None) -> Iterator[Gpu]:
    with gpus.on(request.param) as gpu:
        yield gpu


@pytest.fixture(params=TRANSPORTS)
def way(request: pytest.FixtureRequest) -> str:
    """Return which transport is asked for."""
    return str(request.param)


@pytest.fixture
def group(gpu: Gpu, way: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """Return a group of all ranks, whose modules have no channel of another transport yet."""
    monkeypatch.setenv(settings.DEVICE_TRANSPORT.name, way)
    if gpu.real:
        gpus.require(way, gpu.device)
    else:
        # Whatever this MPI was built for, the simulated memory is the host's.
        monkeypatch.setitem(gpu_choice._tried, (way, gpu.device), (2, ""))
    made = dist.new_group()
    assert isinstance(made, dist.ProcessGroup)
    yield made
    dist.destroy_process_group(made)


class Pair:
    """Equal modules on a GPU, wrapped by our class and by torch's over Gloo.

    Attributes:
        ours: travels in the way that is tried.
        theirs: what it is compared with.
        both: these two.
    """

    def __init__(self, module: nn.Module, where: tuple[Gpu, str, dist.ProcessGroup], **options):
        self.gpu, way, group = where
        gloo = options.pop("gloo")
        module = module.to(self.gpu.device)
        self.ours = DDP(copy.deepcopy(module), process_group=group, **options)
        self.theirs = TorchDDP(copy.deepcopy(module), process_group=gloo, **options)
        self.both = (self.ours, self.theirs)
        with together():
            for bucket in self.ours.reducer.buckets:
                assert type(bucket.channel.transport).__name__ == TRANSPORTS[way]
                assert bucket.memory.divides_before

    def assert_agreement(self, rounding: float = 0) -> None:
        """Assert the same gradients in both, and the same bits on all ranks. Collective."""
        ours, theirs = (on_host(gradients_of(model)) for model in self.both)
        with together():
            # Which kernels add up on a real GPU may depend on the memory's address.
            assert_gradients_close(ours, theirs, 20 if self.gpu.real else 2, rounding)
        assert_same_bits(ours.items())


@pytest.fixture
def where(gpu: Gpu, way: str, group: dist.ProcessGroup) -> tuple[Gpu, str, dist.ProcessGroup]:
    """Return what `Pair` takes."""
    return gpu, way, group


def on_host(tensors: Gradients) -> Gradients:
    """Return copies of tensors, in order of the current stream and of nothing else."""
    return {name: None if t is None else t.detach().cpu() for name, t in tensors.items()}


def draw(gpu: Gpu, *shape: int) -> Tensor:
    """Draw float64 numbers of this rank."""
    return (torch.randn(*shape, dtype=torch.float64) + RANK).to(gpu.device)


@pytest.mark.parametrize("case", ["mlp", "channels_last", "mixed dtypes", "odd layouts"])
def test_training(case, where, views, gloo):
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": SMALL_BUCKETS}
    pair = Pair(CASES[case].make(), where, gloo=gloo, **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5) for model in pair.both]
    for step in range(STEPS):
        batch = share(CASES[case].batch(2 * SIZE)).to(pair.gpu.device)
        for model, optimizer in zip(pair.both, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=step != 1)
            loss_of(model, batch).backward()
        pair.assert_agreement(CASES[case].rounding)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_that_16_bits_do_not_hold(dtype, where, views):
    """Their mean is finite, since they are divided before."""
    gpu, _, group = where
    largest = torch.finfo(dtype).max / 2
    module = GivenGradients(a=torch.zeros(5, dtype=dtype)).to(gpu.device)
    wrapped = DDP(module, process_group=group, gradient_as_bucket_view=views)
    for _ in range(STEPS):
        wrapped.zero_grad()
        wrapped({"a": torch.full((5,), largest * 1.5, dtype=dtype, device=gpu.device)}).backward()
        with together():
            mean = torch.full((5,), largest * 1.5, dtype=dtype)
            assert_gradients_close(on_host(gradients_of(wrapped)), {"a": mean})


def test_accumulation(where, views, gloo):
    """What was summed in no_sync, and means that further gradients are added to."""
    pair = Pair(mlp(3, 4, 2), where, gloo=gloo, gradient_as_bucket_view=views)
    for step in range(6):
        batch = draw(pair.gpu, 2, 3)
        for model in pair.both:
            with contextlib.nullcontext() if step % 3 == 2 else model.no_sync():
                loss_of(model, batch).backward()
        if step % 3 == 2:
            pair.assert_agreement()


def test_unused_parameters(where, views, gloo):
    """Not used by all ranks: zeros count; by none: the gradient stays, and is not divided."""
    module = GivenGradients(**{name: torch.zeros(3) for name in "abc"})
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    pair = Pair(module, where, gloo=gloo, **options)
    for step in range(4):
        used = "a" + ("b" if step % SIZE == RANK else "") + ("c" if step == 1 else "")
        given = {name: draw(pair.gpu, 3).float() for name in used}
        for model in pair.both:
            model(given).backward()
        pair.assert_agreement()


@pytest.mark.parametrize("initial", [True, False], ids=["by all", "by those that are left"])
def test_join(initial, where, views, gloo):
    """Of fewer and fewer ranks; and of all of them again."""
    pair = Pair(mlp(3, 4, 2), where, gloo=gloo, gradient_as_bucket_view=views)
    batches = [draw(pair.gpu, 5, 3) for _ in range(1 + SIZE - RANK)]
    for model in pair.both:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=initial):
            for batch in batches:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
    ours, theirs = (on_host(model.state_dict()) for model in pair.both)
    with together():
        assert_gradients_close(ours, theirs, 20 if pair.gpu.real else 2)
    assert_same_bits(ours.items())
    for model in pair.both:
        model.zero_grad()
        loss_of(model, batches[0]).backward()
    pair.assert_agreement()


@pytest.mark.parametrize("hook", [compression.fp16, compression.bf16])
def test_compression(hook, where, views, gloo):
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": SMALL_BUCKETS}
    pair = Pair(CASES["channels_last"].make(), where, gloo=gloo, **options)
    pair.ours.register_comm_hook(None, hook)
    for step in range(STEPS):
        batch = share(CASES["channels_last"].batch(2 * SIZE)).to(pair.gpu.device)
        for model in pair.both:
            model.zero_grad(set_to_none=step != 1)
            loss_of(model, batch).backward()
        pair.assert_agreement(rounding=0.02)


def test_hook_in_python(where, views, gloo):
    """It makes the means itself, and nothing else divides."""
    pair = Pair(mlp(3, 4, 2), where, gloo=gloo, gradient_as_bucket_view=views)
    # Another group than the module's own, or a recognised hook would not be called.
    pair.ours.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    for _ in range(STEPS):
        batch = draw(pair.gpu, 2, 3)
        for model in pair.both:
            model.zero_grad()
            loss_of(model, batch).backward()
        pair.assert_agreement()


def test_late_gradients(where, views):
    """Neither the division nor MPI comes before the kernel that finishes the gradient."""
    gpu, _, group = where
    module = GivenGradients(a=torch.zeros(gpu.many), b=torch.zeros(3)).to(gpu.device)
    extra = torch.full((gpu.many,), RANK + 1.0, device=gpu.device)
    module.a.register_post_accumulate_grad_hook(lambda p: gpu.add_late(p.grad, extra, 0.03))
    wrapped = DDP(module, process_group=group, gradient_as_bucket_view=views)
    ones = {name: torch.ones_like(p) for name, p in module.named_parameters()}
    mean = 1 + (SIZE + 1) / 2
    with gpu.side_stream():
        for step in range(STEPS):
            wrapped.zero_grad(set_to_none=step == 0)
            wrapped(ones).backward()
            least, most = (float(value) for value in module.a.grad.aminmax())
            with together():
                assert (least, most) == pytest.approx((mean, mean))

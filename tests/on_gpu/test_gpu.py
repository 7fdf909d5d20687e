"""Modules on a real GPU, which the ranks share: our class beside torch's over Gloo.

    python tests/support/launch.py -n 2,4 -m gpu

None of these tests runs unless `-m gpu` asks for it.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from models import CASES, GivenGradients, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    STEPS,
    Gradients,
    assert_close,
    assert_gradients_close,
    assert_same_bits,
    gradients_of,
    together,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import mpiddp
from mpiddp import DistributedDataParallel as DDP
from mpiddp import compression

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.mpi(min_size=2),
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides"),
    pytest.mark.filterwarnings("ignore:Detected uneven input skew"),
    # Of cuDNN, whose weights are in one block of memory until they are copied.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous"),
]

SMALL_BUCKETS = 0.0005
DEVICE = torch.device("cuda", RANK % max(torch.cuda.device_count(), 1))
# Which kernels add up may depend on the memory's address.
FACTOR = 20


@pytest.fixture(autouse=True)
def _on_own_device() -> Iterator[None]:
    torch.cuda.set_device(DEVICE)
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        yield


def wrap_both(
    module: nn.Module, group: dist.ProcessGroup, **options: object
) -> tuple[DDP, TorchDDP]:
    """Return two equal models on this rank's device, wrapped by our class and by torch's."""
    module = module.to(DEVICE)
    return (
        DDP(copy.deepcopy(module), **options),
        TorchDDP(copy.deepcopy(module), process_group=group, **options),
    )


def on_host(gradients: Gradients) -> Gradients:
    """Return copies of gradients, in order of the current stream and of nothing else."""
    return {name: None if g is None else g.detach().cpu() for name, g in gradients.items()}


def assert_agreement(pair: tuple[DDP, TorchDDP], factor: float = 1, rounding: float = 0) -> None:
    """Assert that both have the same gradients, and all ranks the same bits. Collective."""
    ours, theirs = (on_host(gradients_of(model)) for model in pair)
    with together():
        assert_gradients_close(ours, theirs, factor * FACTOR, rounding)
    assert_same_bits(ours.items())


def batch_of_rank(case: str) -> Tensor:
    """Draw this rank's own part of a batch, the same wherever it is computed."""
    batch = CASES[case].batch(2 * SIZE).chunk(SIZE)[RANK]
    return batch.to(DEVICE)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw numbers of this rank."""
    return (torch.randn(*shape, dtype=dtype) + RANK).to(DEVICE)


@pytest.mark.parametrize("size", [None, SMALL_BUCKETS], ids=["large", "small"])
@pytest.mark.parametrize("case", CASES)
def test_training(case, size, views, gloo):
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": size}
    pair = wrap_both(CASES[case].make(), gloo, **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5) for model in pair]
    for step in range(STEPS):
        batch = batch_of_rank(case)
        for model, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=step != 1)
            loss_of(model, batch).backward()
        assert_agreement(pair, rounding=CASES[case].rounding)
        for optimizer in optimizers:
            optimizer.step()
    with together():
        assert all(bucket.on_gpu for bucket in pair[0].reducer.buckets)


def test_device_ids(gloo):
    """Inputs on the CPU are moved; the attributes are torch's."""
    index = DEVICE.index
    pair = wrap_both(mlp(3, 4, 2), gloo, device_ids=[index], output_device=index)
    batch = torch.randn(2, 3, dtype=torch.float64) + RANK
    for model in pair:
        loss_of(model, batch).backward()
    assert_agreement(pair)
    with together():
        for name in ("device_ids", "output_device", "device", "device_type"):
            assert getattr(pair[0], name) == getattr(pair[1], name)


@pytest.mark.parametrize(
    "options",
    [{"device_ids": [0, 1]}, {"device_ids": ["cpu"]}, {"output_device": 1}],
    ids=lambda options: next(iter(options)) + str(len(str(options))),
)
def test_devices_that_torch_refuses(options, gloo):
    for wrap in (DDP, lambda module, **how: TorchDDP(module, process_group=gloo, **how)):
        with together(), pytest.raises(ValueError, match="device"):
            wrap(mlp(3, 2).to(DEVICE), **options)


def test_accumulation(views, gloo):
    pair = wrap_both(mlp(3, 4, 2), gloo, gradient_as_bucket_view=views)
    for step in range(6):
        batch = draw(2, 3)
        for model in pair:
            with contextlib.nullcontext() if step % 3 == 2 else model.no_sync():
                loss_of(model, batch).backward()
        if step % 3 == 2:
            assert_agreement(pair)


def test_parameters_unused_in_turn(views, gloo):
    names = ["a", "b", "c", "d"]
    module = GivenGradients(**{name: torch.zeros(3) for name in names})
    pair = wrap_both(module, gloo, find_unused_parameters=True, gradient_as_bucket_view=views)
    generator = torch.Generator().manual_seed(3)
    for step in range(6):
        used = torch.rand(SIZE, 4, generator=generator) < 0.4
        used[:, 0] = True
        if step < 2:
            used[:, 3] = False
        given = {name: draw(3).float() for column, name in enumerate(names) if used[RANK, column]}
        for model in pair:
            if step % 2:
                model.zero_grad()
            model(given).backward()
        ours, theirs = (on_host(gradients_of(model)) for model in pair)
        with together():
            assert_gradients_close(ours, theirs)


class _Checkpointed(nn.Module):
    """Uses a layer in several reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(self.layer, x, use_reentrant=True).tanh()
        return x


def test_static_graph(views, gloo):
    options = {"static_graph": True, "gradient_as_bucket_view": views}
    pair = wrap_both(_Checkpointed(), gloo, **options)
    for _ in range(4):
        x = draw(2, 3).requires_grad_()
        for model in pair:
            model.zero_grad()
            loss_of(model, x).backward()
        assert_agreement(pair)


def test_join_with_buffers(views, gloo):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    pair = wrap_both(module, gloo, gradient_as_bucket_view=views)
    batches = [draw(5, 3, dtype=torch.float32) for _ in range(1 + SIZE - RANK)]
    for model in pair:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for batch in batches:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
    ours, theirs = (on_host(model.state_dict()) for model in pair)
    with together():
        for name, tensor in ours.items():
            assert_close(tensor, theirs[name], name, FACTOR)
    assert_same_bits(ours.items())


def _doubled(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum gradients, with the work on a stream of the hook's own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        buffer = bucket.buffer().div_(SIZE)
        dist.all_reduce(buffer, group=state)
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[DEVICE])
    with torch.cuda.stream(side):
        future.set_result(buffer * 2)
    return future


@pytest.mark.parametrize("hook", [_doubled, default_hooks.allreduce_hook])
def test_hooks_in_python(hook, views, gloo):
    pair = wrap_both(CASES["channels_last"].make(), gloo, gradient_as_bucket_view=views)
    # Another group than the module's own, so that a recognised hook is called as well.
    groups = (dist.new_group(), gloo)
    for model, group in zip(pair, groups, strict=True):
        model.register_comm_hook(group, hook)
    for _ in range(STEPS):
        batch = batch_of_rank("channels_last")
        for model in pair:
            model.zero_grad()
            loss_of(model, batch).backward()
        assert_agreement(pair)


@pytest.mark.parametrize("hook", [compression.fp16, compression.bf16])
def test_compression(hook, views, gloo):
    pair = wrap_both(CASES["channels_last"].make(), gloo, gradient_as_bucket_view=views)
    pair[0].register_comm_hook(None, hook)
    for step in range(STEPS):
        batch = batch_of_rank("channels_last")
        for model in pair:
            model.zero_grad(set_to_none=step != 1)
            loss_of(model, batch).backward()
        assert_agreement(pair, rounding=0.02)


def test_sparse_gradients(views, gloo):
    module = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    pair = wrap_both(module, gloo, gradient_as_bucket_view=views)
    for step in range(STEPS):
        for model in pair:
            model.zero_grad()
            loss_of(model, torch.tensor([[RANK, RANK, 8], [step, 1, 2]], device=DEVICE)).backward()
        ours, theirs = (on_host(gradients_of(model)) for model in pair)
        with together():
            assert_gradients_close(ours, theirs, FACTOR)


def test_delayed_parameters(gloo):
    modules = [mlp(3, 4, 2, dtype=torch.float32).to(DEVICE) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    models = []
    for module, wrap in ((modules[0], DDP), (modules[1], TorchDDP)):
        parameters = dict(module.named_parameters())
        models.append(
            wrap(
                module,
                device_ids=[DEVICE.index],
                process_group=None if wrap is DDP else gloo,
                delay_all_reduce_named_params=[("2.weight", parameters["2.weight"])],
                param_to_hook_all_reduce=parameters["0.bias"],
            )
        )
    for _ in range(STEPS):
        batch = draw(2, 3, dtype=torch.float32)
        for model in models:
            model.zero_grad()
            loss_of(model, batch).backward()
        dist.barrier(gloo)  # torch's class does not wait
        torch.cuda.synchronize()
        assert_agreement((models[0], models[1]))


@pytest.mark.parametrize("reduce", [torch.float16, torch.float32], ids=str)
def test_mixed_precision(reduce, views, gloo):
    """But for the first step, in which torch's class reads memory at random, as with views."""
    config = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=reduce)
    module = mlp(6, 8, 3, dtype=torch.float32)
    pair = wrap_both(module, gloo, mixed_precision=config)
    if views:
        model = DDP(copy.deepcopy(module), mixed_precision=config, gradient_as_bucket_view=True)
        pair = (model, pair[1])
    for step in range(4):
        batch = draw(4, 6, dtype=torch.float32)
        for model in pair:
            model.zero_grad()
            loss_of(model, batch).backward()
        with together():
            assert {p.dtype for p in pair[0].parameters()} == {torch.float32}
        if step > 0:
            assert_agreement(pair, rounding=0.01)


def test_scaler_and_autocast(views, gloo):
    """An infinity on one rank makes all ranks leave out the step."""
    pair = wrap_both(mlp(6, 8, 3, dtype=torch.float32), gloo, gradient_as_bucket_view=views)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in pair]
    scalers = [torch.amp.GradScaler("cuda", init_scale=1024.0) for _ in pair]
    for step in range(STEPS):
        batch = draw(4, 6, dtype=torch.float32)
        if step == 1 and RANK == SIZE - 1:
            batch[0, 0] = torch.inf
        for model, optimizer, scaler in zip(pair, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        with together():
            assert scalers[0].get_scale() == scalers[1].get_scale() == (512 if step else 1024)
            ours, theirs = (on_host(model.state_dict()) for model in pair)
            for name, tensor in ours.items():
                assert_close(tensor, theirs[name], name, rounding=0.01)
        assert_same_bits(ours.items())


def test_sync_batch_norm():
    """The ranks' statistics are those of the whole batch."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(DEVICE)
    batch = torch.randn(4 * SIZE, 3).to(DEVICE)
    alone = copy.deepcopy(module)
    loss_of(alone, batch).backward()
    wrapped = DDP(mpiddp.SyncBatchNorm.convert_sync_batchnorm(module), device_ids=[DEVICE.index])
    loss_of(wrapped, batch.chunk(SIZE)[RANK]).backward()
    ours, expected = on_host(gradients_of(wrapped)), on_host(gradients_of(alone))
    with together():
        assert_gradients_close(ours, expected, 10 * FACTOR)


# Streams.


def _slow(parameter: Tensor, extra: Tensor) -> object:
    """Let a slow kernel finish the gradient of a parameter, before the wrapper sees it."""

    def hook(p: Tensor) -> None:
        torch.cuda._sleep(50_000_000)  # about 30 ms
        p.grad.add_(extra)

    return parameter.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_slow_kernels(side, views):
    """No rank sends a gradient before it is there, nor reads a mean before it is back."""
    module = GivenGradients(a=torch.zeros(1 << 20), b=torch.zeros(3)).to(DEVICE)
    _slow(module.a, torch.full((1 << 20,), RANK + 1.0, device=DEVICE))
    wrapped = DDP(module, gradient_as_bucket_view=views)
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    ones = {"a": torch.ones(1 << 20, device=DEVICE), "b": torch.ones(3, device=DEVICE)}
    mean = 1 + (SIZE + 1) / 2
    with torch.cuda.stream(stream):
        for step in range(STEPS):
            wrapped.zero_grad(set_to_none=step == 0)
            wrapped(ones).backward()
            least, most = (m.item() for m in module.a.grad.aminmax())
            with together():
                assert (least, most) == (mean, mean)


def test_parts_of_a_module_on_streams_of_their_own(views):
    """The backward pass makes each part's gradients on the stream of its forward."""
    module = nn.ModuleList([mlp(300, 300, dtype=torch.float32) for _ in range(2)]).to(DEVICE)
    streams = [torch.cuda.Stream() for _ in module]

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = module

        def forward(self, x: Tensor) -> Tensor:
            results = []
            for part, stream in zip(self.parts, streams, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(5_000_000)
                    results.append(part(x))
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
            return torch.stack(results).sum(0)

    x = torch.randn(4 * SIZE, 300).to(DEVICE)
    alone = copy.deepcopy(module)
    loss_of(lambda x: alone[0](x) + alone[1](x), x).backward()  # type: ignore[arg-type]
    wrapped = DDP(Parts(), gradient_as_bucket_view=views)
    for _ in range(STEPS):
        wrapped.zero_grad()
        loss_of(wrapped, x.chunk(SIZE)[RANK]).backward()
        ours, expected = on_host(gradients_of(module)), on_host(gradients_of(alone))
        with together():
            assert_gradients_close(ours, expected, 10 * FACTOR)


def test_nothing_waits_for_the_device(views):
    """No operation of torch's in backward does, which is where an error would come from."""
    wrapped = DDP(mlp(30, 40, 20).to(DEVICE), gradient_as_bucket_view=views)
    batches = [draw(2, 30) for _ in range(STEPS)]
    for batch in batches:
        loss = loss_of(wrapped, batch)
        wrapped.zero_grad()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


# Memory.


@pytest.mark.parametrize("set_to_none", [True, False], ids=["dropped", "zeroed"])
def test_peak_memory(set_to_none, views, gloo):
    """A step takes as much as with torch's class, but for what is gathered for one kernel."""

    def peak(wrap: Callable[[nn.Module], nn.Module]) -> int:
        model = wrap(mlp(*[1024] * 9, dtype=torch.float32).to(DEVICE))  # 32 MiB
        for step in range(4):
            if step == 3:
                torch.cuda.reset_peak_memory_stats()
            model.zero_grad(set_to_none=set_to_none)
            loss_of(model, torch.ones(8, 1024, device=DEVICE)).backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": 8}
    start = torch.cuda.memory_allocated()
    theirs = peak(lambda module: TorchDDP(module, process_group=gloo, **options)) - start
    start = torch.cuda.memory_allocated()
    ours = peak(lambda module: DDP(module, **options)) - start
    with together():
        assert ours <= theirs + (8 << 20), f"{ours >> 20} MiB, torch {theirs >> 20}"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_module_on_two_devices(views, gloo):
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = mlp(3, 4).to("cuda:0")
            self.second = mlp(4, 2).to("cuda:1")

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(self.first(x.to("cuda:0")).to("cuda:1"))
            return y

    module = Halves()
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": SMALL_BUCKETS}
    pair = (
        DDP(copy.deepcopy(module), **options),
        TorchDDP(copy.deepcopy(module), process_group=gloo, **options),
    )
    for _ in range(STEPS):
        batch = draw(2, 3)
        for model in pair:
            model.zero_grad()
            loss_of(model, batch).backward()
        assert_agreement(pair)

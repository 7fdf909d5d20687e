"""SyncBatchNorm on the ranks' batches is BatchNorm on all of them together."""

import copy
import inspect
import itertools

import pytest
import torch
import torch.distributed as dist
from replicas import (
    RANK,
    SIZE,
    assert_close,
    assert_gradients_close,
    assert_replicated,
    assert_same_bits,
    gather,
    gradients_of,
    share,
    together,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import mpiddp
from mpiddp import DistributedDataParallel as DDP
from mpiddp import SyncBatchNorm

pytestmark = [
    pytest.mark.mpi,
    # dynamo reads .grad of what passes between two graphs, and hides its warning in its own way.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

CHANNELS = 3
SHAPES = [(CHANNELS,), (CHANNELS, 4), (CHANNELS, 4, 5), (CHANNELS, 2, 3, 4)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class _AnyShape(nn.BatchNorm2d):
    """torch's BatchNorm for inputs of any number of dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def make_pair(dtype: torch.dtype = torch.float64, **options: object) -> tuple[nn.Module, nn.Module]:
    """Return SyncBatchNorm and BatchNorm with equal weights and biases, not 1 and 0."""
    alone = _AnyShape(CHANNELS, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.copy_(torch.linspace(-1, 2, CHANNELS))
    synchronised = SyncBatchNorm(CHANNELS, dtype=dtype, **options)
    synchronised.load_state_dict(alone.state_dict())
    return synchronised, alone


def split(batch: Tensor, rows: list[int], rank: int = RANK) -> Tensor:
    return batch.split(rows)[rank]


def rows_each(*counts: int) -> list[int]:
    """Return how many rows each rank has: `counts` again and again."""
    return list(itertools.islice(itertools.cycle(counts), SIZE))


def compare_step(
    pair: tuple[nn.Module, nn.Module], batch: Tensor, rows: list[int], factor: float = 4
) -> None:
    """Compare output, gradients and statistics of one step with those of the whole batch."""
    synchronised, alone = pair
    weights = torch.randn(batch.shape).to(batch.dtype)
    whole = batch.clone().requires_grad_()
    own = split(batch, rows).clone(memory_format=torch.preserve_format).requires_grad_()
    expected = alone(whole)
    (expected * weights).sum().backward()
    output = synchronised(own)
    (output * split(weights, rows)).sum().backward()
    with together():
        assert_close(output, split(expected, rows), "output", factor)
        assert_close(own.grad, split(whole.grad, rows), "gradient of the input", factor)
        if own.numel():
            assert output.stride() == own.stride()
        for name, buffer in synchronised.named_buffers():
            assert_close(buffer, alone.get_buffer(name), name, factor)
    assert_same_bits(synchronised.named_buffers())
    for name, parameter in synchronised.named_parameters():
        total = sum(gather(parameter.grad))
        with together():
            assert_close(total, alone.get_parameter(name).grad, f"gradient of {name}", factor)


@pytest.mark.essential(keep=3)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape) + 1}-D")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_and_dtypes(dtype, shape):
    pair = make_pair(torch.float32 if dtype.itemsize == 2 else dtype)
    for _ in range(2):
        compare_step(pair, (2 * torch.randn(3 * SIZE, *shape) + 1).to(dtype), [3] * SIZE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_16_bits(dtype):
    pair = make_pair(dtype)
    compare_step(pair, torch.randn(3 * SIZE, CHANNELS, 4).to(dtype), [3] * SIZE)


@pytest.mark.parametrize(
    ("memory_format", "shape"),
    [
        (torch.channels_last, (CHANNELS, 4, 5)),
        (torch.channels_last_3d, (CHANNELS, 2, 4, 5)),
    ],
    ids=["channels_last", "channels_last_3d"],
)
def test_memory_formats(memory_format, shape):
    batch = torch.randn(2 * SIZE, *shape, dtype=torch.float64)
    compare_step(make_pair(), batch.contiguous(memory_format=memory_format), [2] * SIZE)


def test_input_that_is_not_contiguous():
    synchronised, alone = make_pair()
    batch = torch.randn(2 * SIZE, CHANNELS, 8, dtype=torch.float64)
    with together():
        actual = synchronised(share(batch)[:, :, ::2])
        assert_close(actual, share(alone(batch[:, :, ::2])), "output")
        # The gradient of a sum is expanded from one number.
        actual.sum().backward()
        assert synchronised.bias.grad.tolist() == [8.0] * CHANNELS


@pytest.mark.parametrize("rows", [(1, 2), (0, 3), (3, 0), (5, 0, 1)], ids=str)
def test_uneven_batches(rows):
    counts = rows_each(*rows)
    if sum(counts) < 2:
        counts[0] = 4
    pair = make_pair()
    for _ in range(2):
        compare_step(pair, torch.randn(sum(counts), CHANNELS, 4, dtype=torch.float64), counts)


@pytest.mark.mpi(min_size=2)
def test_one_value_on_each_rank():
    compare_step(make_pair(), torch.randn(SIZE, CHANNELS, dtype=torch.float64), [1] * SIZE)


def test_one_value_on_all_ranks_is_an_error_on_all():
    synchronised, _ = make_pair()
    with together(), pytest.raises(ValueError, match="more than 1 value per channel"):
        synchronised(torch.randn(1 if RANK == 0 else 0, CHANNELS, dtype=torch.float64))


def test_nothing_on_any_rank():
    synchronised, _ = make_pair()
    empty = torch.zeros(0, CHANNELS, 2, dtype=torch.float64, requires_grad=True)
    with together():
        synchronised(empty).sum().backward()
        assert empty.grad.shape == empty.shape
        assert synchronised.running_mean.tolist() == [0.0] * CHANNELS
        assert synchronised.running_var.tolist() == [1.0] * CHANNELS


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 1.0},
        {"affine": False},
        pytest.param(
            {"bias": False},
            marks=pytest.mark.skipif(  # an older torch's BatchNorm always has a bias
                "bias" not in inspect.signature(nn.BatchNorm2d).parameters,
                reason="this torch's BatchNorm always has a bias",
            ),
        ),
        {"track_running_stats": False},
        {"eps": 0.5},
    ],
    ids=str,
)
def test_options(options):
    pair = make_pair(**options)
    counts = rows_each(2, 1)
    counts[0] += 1
    for _ in range(3):
        compare_step(pair, torch.randn(sum(counts), CHANNELS, 4, dtype=torch.float64) + 1, counts)
    batch = torch.randn(SIZE * 2, CHANNELS, 4, dtype=torch.float64)
    for module in pair:
        module.eval()
    with together():
        own = share(batch)
        assert_close(pair[0](own), pair[1](own), "output in evaluation")


def test_evaluation_talks_to_nobody():
    synchronised, alone = make_pair()
    synchronised.eval()
    alone.eval()
    if RANK == 0:
        batch = torch.randn(2, CHANNELS, dtype=torch.float64)
        assert torch.equal(synchronised(batch), alone(batch))
    with together():
        assert synchronised.num_batches_tracked == 0


@pytest.mark.parametrize("offset", [1e3, 1e4])
def test_large_mean(offset):
    """The variance is not lost beside the square of the mean."""
    batch = torch.randn(8 * SIZE, CHANNELS, 64) + offset
    synchronised, _ = make_pair(torch.float32)
    synchronised(share(batch))
    expected = batch.double().transpose(0, 1).flatten(1).var(1)
    with together():
        actual = (synchronised.running_var.double() - 0.9) / 0.1
        assert_close(actual, expected, "variance", rounding=1e-4)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_very_different_batches():
    offsets = torch.arange(SIZE, dtype=torch.float64).view(-1, 1, 1) * 1e3
    batch = (torch.randn(SIZE, CHANNELS, 5, dtype=torch.float64) + offsets).contiguous()
    compare_step(make_pair(), batch, [1] * SIZE, 1e3)


@pytest.mark.mpi(min_size=3)
def test_group_of_some_ranks():
    members = [0, SIZE - 1]
    part = dist.new_group(members)
    batch = torch.randn(4, CHANNELS, dtype=torch.float64)
    with together():
        if RANK in members:
            synchronised, alone = make_pair()
            synchronised.process_group = part
            actual = synchronised(batch.chunk(2)[members.index(RANK)])
            assert_close(actual, alone(batch).chunk(2)[members.index(RANK)], "output")
    if RANK in members:
        dist.destroy_process_group(part)


def test_over_gloo(gloo):
    synchronised, alone = make_pair()
    synchronised.process_group = gloo
    batch = torch.randn(3 * SIZE, CHANNELS, 2, dtype=torch.float64)
    with together():
        assert_close(synchronised(share(batch)), share(alone(batch)), "output")


@pytest.mark.parametrize("size", [(4,), (2, 0, 3)], ids=str)
def test_wrong_shapes(size):
    with together(), pytest.raises(ValueError, match=r"at least 2D|non-zero"):
        make_pair()[0](torch.zeros(size, dtype=torch.float64))


@pytest.mark.mpi(min_size=2)
def test_second_derivative_is_refused():
    synchronised, _ = make_pair()
    own = torch.randn(3, CHANNELS, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(synchronised(own).square().sum(), own, create_graph=True)
    with together(), pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


class _Net(nn.Sequential):
    """Layers in a class of the user: torch's own Sequential is never compiled alone."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def make_net() -> _Net:
    return _Net(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5)),
        nn.Linear(5, 1),
    ).double()


class TestConversion:
    @pytest.mark.essential
    def test_replaces_every_layer(self):
        net = make_net()
        net[1].momentum = None
        net[3][2].eval()
        before = copy.deepcopy(net.state_dict())
        parameters = {name: id(p) for name, p in net.named_parameters()}
        converted = SyncBatchNorm.convert_sync_batchnorm(net, dist.group.WORLD)
        with together():
            assert converted is net
            for layer in (net[1], net[3][2]):
                assert type(layer) is SyncBatchNorm
                assert isinstance(layer, nn.SyncBatchNorm)
                assert layer.process_group is dist.group.WORLD
            assert net[1].momentum is None
            assert net[1].training
            assert not net[3][2].training
            assert {name: id(p) for name, p in net.named_parameters()} == parameters
            assert net.state_dict().keys() == before.keys()

    def test_layer_itself(self):
        layer = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
        converted = mpiddp.SyncBatchNorm.convert_sync_batchnorm(layer)
        with together():
            assert type(converted) is SyncBatchNorm
            assert converted.weight is None
            assert converted.running_mean is None
            assert converted.process_group is None

    def test_of_torchs_synchronised_layer(self):
        layer = SyncBatchNorm.convert_sync_batchnorm(nn.SyncBatchNorm(CHANNELS))
        with together():
            assert layer(torch.randn(2, CHANNELS)).shape == (2, CHANNELS)

    def test_copies_and_checkpoints(self):
        layer = SyncBatchNorm(CHANNELS)
        twin = copy.deepcopy(layer)
        twin.load_state_dict(nn.BatchNorm1d(CHANNELS).state_dict())
        with together():
            assert twin.state_dict().keys() == layer.state_dict().keys()


@pytest.mark.essential(keep=2)
@pytest.mark.smoke(keep=1)
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("wrapper", ["ours", "ours, compiled", "torch's", "torch's on gloo"])
def test_trains_like_one_process(wrapper, request):
    """Wrapped, over several steps, the model is that of one process on the whole batch."""
    alone = make_net()
    net = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    if wrapper.startswith("ours"):
        wrapped = DDP(net)
    elif wrapper == "torch's":
        wrapped = TorchDDP(net)
    else:
        wrapped = TorchDDP(net, process_group=request.getfixturevalue("gloo"))
    run = torch.compile(wrapped, backend="aot_eager") if "compiled" in wrapper else wrapped
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (wrapped, alone)]
    for step in range(3):
        batch = torch.randn(3 * SIZE, 2, 5, 5, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        alone(batch).square().mean().backward()
        run(share(batch)).square().mean().backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), gradients_of(alone), 100)
        assert_replicated(wrapped)
        if step == 1:
            for module, part in ((run, share(batch)), (alone, batch)):
                module.eval()
                module(part)
                module.train()
        for optimizer in optimizers:
            optimizer.step()
    with together():
        for name, buffer in net.named_buffers():
            assert_close(buffer, alone.get_buffer(name), name, 100)
    assert_same_bits(net.named_buffers())


def test_statistics_are_shared_under_no_sync():
    alone = make_net()
    net = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    wrapped = DDP(net)
    batches = torch.randn(2, 3 * SIZE, 2, 5, 5, dtype=torch.float64)
    for batch in batches:
        alone(batch).square().mean().backward()
    with wrapped.no_sync():
        wrapped(share(batches[0])).square().mean().backward()
    wrapped(share(batches[1])).square().mean().backward()
    with together():
        assert_gradients_close(gradients_of(wrapped), gradients_of(alone), 100)


def test_logged(gloo):
    net = SyncBatchNorm.convert_sync_batchnorm(make_net())
    with together():
        assert DDP(net)._get_ddp_logging_data()["has_sync_bn"] == 1
        assert TorchDDP(net, process_group=gloo)._get_ddp_logging_data()["has_sync_bn"] == 1


@pytest.mark.parametrize("wrapper", [DDP, TorchDDP])
def test_torchs_own_layer_is_refused_on_the_cpu(wrapper):
    net = nn.SyncBatchNorm.convert_sync_batchnorm(make_net())
    with together(), pytest.raises(ValueError, match="GPU modules"):
        wrapper(net)

"""torch.compile of a wrapped module, and of the module inside, as with torch's class."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replicas import (
    RANK,
    SIZE,
    assert_close,
    assert_gradients_close,
    assert_replicated,
    gradients_of,
    mean_of_ranks,
    share,
    together,
)
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that counts the graphs that it is given to compile."""

    def __init__(self) -> None:
        self.parameters: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.parameters.append(sum(isinstance(i, nn.Parameter) for i in inputs))
        return aot_eager(graph, inputs)

    @property
    def graphs(self) -> int:
        return len(self.parameters)


class Net(nn.Module):
    """A chain of layers in a class of the user: torch's own Sequential is never compiled alone."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def make_net(width: int = 300, layers: int = 6) -> Net:
    """Return layers of 361 KB each, so that three fill the first bucket of 1 MiB."""
    return Net(*(nn.Linear(width, width) for _ in range(layers)))


def loss_of(model: Callable[..., Tensor], batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def train(run: Callable[..., Tensor], wrapped: nn.Module, net: nn.Module, steps: int = 3) -> None:
    """Compare the gradients of some steps with those of one process in eager mode."""
    for _ in range(steps):
        batch = torch.randn(2 * SIZE, 300)
        expected = mean_of_ranks(net, lambda model, rank, b=batch: loss_of(model, share(b, rank)))
        wrapped.zero_grad()
        loss_of(run, share(batch)).backward()
        with together():
            assert_gradients_close(gradients_of(net), expected, 10)
        assert_replicated(net)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(parameter.grad, alpha=-0.1)


@pytest.mark.essential(keep=1)
@pytest.mark.thorough
@pytest.mark.parametrize(("cap", "views"), [(None, False), (2, True)], ids=str)
def test_graphs_end_where_buckets_do(cap, views, gloo):
    """As many compiled graphs as with torch's class, one for each of our buckets."""
    net = make_net()
    ours = DDP(net, bucket_cap_mb=cap, gradient_as_bucket_view=views)
    backend = Counting()
    train(torch.compile(ours, backend=backend), ours, net)
    torch._dynamo.reset()
    theirs = TorchDDP(
        make_net(), process_group=gloo, bucket_cap_mb=cap, gradient_as_bucket_view=views
    )
    reference = Counting()
    loss_of(torch.compile(theirs, backend=reference), torch.randn(2, 300)).backward()
    with together():
        assert backend.parameters == reference.parameters
        assert backend.graphs > 1
        assert backend.graphs == len(ours.reducer.buckets)


@pytest.mark.thorough
def test_graphs_end_at_our_own_default_size(monkeypatch):
    """Between nodes graphs are smaller than torch's, and buckets are smaller than those."""
    net = make_net(600, 8)  # 1.44 MB each: the first alone, then three to fill 4 MiB
    wrapped = DDP(net, transport="mpi")
    backend = Counting()
    loss_of(torch.compile(wrapped, backend=backend), torch.randn(2, 600)).backward()
    with together():
        expected = 4 << 20 if SIZE > 1 else 25 << 20
        assert wrapped.bucket_bytes_cap == expected
        assert backend.graphs == (4 if SIZE > 1 else 2)
        assert len(wrapped.reducer.buckets) == (8 if SIZE > 1 else 2)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("mode", [False, "no_optimization", "ddp_optimizer"], ids=str)
def test_modes(mode):
    net = make_net(layers=4)
    wrapped = DDP(net, bucket_cap_mb=1)
    backend = Counting()
    with torch._dynamo.config.patch(optimize_ddp=mode):
        train(torch.compile(wrapped, backend=backend), wrapped, net)
    with together():
        assert (backend.graphs == 1) == (mode != "ddp_optimizer")


def test_compiled_module_inside():
    """The whole module is one graph, whose gradients arrive together."""
    net = make_net()
    backend = Counting()
    wrapped = DDP(torch.compile(net, backend=backend), bucket_cap_mb=1)
    with torch._dynamo.config.patch(optimize_ddp=False):
        train(wrapped, wrapped, net)
    with together():
        assert backend.graphs == 1


@pytest.mark.essential
def test_compiled_layers_inside():
    net = make_net(layers=4)
    for layer in net.layers:
        layer.compile(backend="aot_eager")
    wrapped = DDP(net)
    train(wrapped, wrapped, net)


def test_same_gradients_as_torch(gloo):
    net = make_net()
    pair = (DDP(copy.deepcopy(net)), TorchDDP(net, process_group=gloo))
    runs = [torch.compile(model, backend="aot_eager") for model in pair]
    for _ in range(3):
        batch = torch.randn(2, 300) + RANK
        for model, run in zip(pair, runs, strict=True):
            model.zero_grad()
            loss_of(run, batch).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair), 2)


@pytest.mark.smoke
def test_compiled_step():
    """Forward, loss and backward compiled together."""
    net = make_net(layers=4)
    wrapped = DDP(net)

    @torch.compile(backend="aot_eager")
    def step(batch: Tensor) -> Tensor:
        loss = wrapped(batch).square().mean()
        loss.backward()
        return loss.detach()

    for _ in range(3):
        batch = torch.randn(2 * SIZE, 300)
        expected = mean_of_ranks(net, lambda model, rank, b=batch: loss_of(model, share(b, rank)))
        wrapped.zero_grad()
        step(share(batch))
        with together():
            assert_gradients_close(gradients_of(wrapped), expected, 10)


def test_no_sync():
    net = make_net(layers=4)
    wrapped = DDP(net)
    run = torch.compile(wrapped, backend="aot_eager")
    for _ in range(2):
        batches = torch.randn(2, 2 * SIZE, 300)
        expected = mean_of_ranks(
            net, lambda model, rank, b=batches: sum(loss_of(model, share(one, rank)) for one in b)
        )
        wrapped.zero_grad()
        with wrapped.no_sync():
            loss_of(run, share(batches[0])).backward()
        loss_of(run, share(batches[1])).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), expected, 10)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("wrapper", ["ours", "torch's"])
def test_buffers_are_still_synchronised(wrapper):
    """What copies them is not itself compiled, in whichever wrapper."""
    net = Net(nn.Linear(300, 300), nn.BatchNorm1d(300))
    wrapped = DDP(net) if wrapper == "ours" else TorchDDP(net)
    backend = Counting()
    run = torch.compile(wrapped, backend=backend)
    for _ in range(3):
        wrapped.zero_grad()
        loss_of(run, torch.randn(4, 300) + RANK).backward()
        with together():
            assert gradients_of(wrapped)["layers.0.weight"] is not None
    mean = net.layers[1].running_mean.clone()
    dist.broadcast(mean, 0)
    net.eval()
    run(torch.randn(4, 300))  # begins with the buffers of rank 0
    with together():
        assert_close(net.layers[1].running_mean, mean, "running mean")
        # One for training, one for evaluation.
        assert backend.graphs == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit")  # of inductor's own
def test_inductor():
    net = make_net(layers=4)
    wrapped = DDP(net, bucket_cap_mb=1)
    train(torch.compile(wrapped), wrapped, net)


@pytest.fixture
def _python_reducer() -> Iterator[None]:
    """Switch torch's reducer in Python on, and take back what its wrapper changes for good."""
    inlined = torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST
    before = set(inlined)
    fuse = torch._inductor.config._fuse_ddp_communication
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True):
        yield
    torch._inductor.config._fuse_ddp_communication = fuse
    inlined.intersection_update(before)
    torch._dynamo.trace_rules.get_legacy_mod_inlinelist.cache_clear()


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=1)
@pytest.mark.usefixtures("_python_reducer")
@pytest.mark.parametrize("wrapper", ["ours", "torch's"])
def test_python_reducer(wrapper):
    """Torch's reducer in Python, which compiles the all-reduces, goes over our process group."""
    net = make_net(layers=2)
    wrapped = DDP(net) if wrapper == "ours" else TorchDDP(net)
    train(torch.compile(wrapped, backend="aot_eager"), wrapped, net)

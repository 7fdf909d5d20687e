"""The order of kernels, copies and means on the streams of a simulated GPU, as modules see it.

Each test holds up a kernel or a copy, so that a wait that is left out shows in the gradients.
"""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from models import GivenGradients, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    STEPS,
    assert_close,
    assert_gradients_close,
    call_behind_wrapper,
    gradients_of,
    mean_by_hook,
    mean_of_ranks,
    share,
    together,
)
from simulated_gpu import InOrderOfStream, SimulatedRuntime, on_cpu_tensors
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp import compression
from mpiddp.gpu.runtime import Event, Stream

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.once,
    pytest.mark.simulated_gpu,
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides"),
]

SMALL_BUCKETS = 0.0005


@pytest.fixture(autouse=True)
def gpu(world: None) -> Iterator[SimulatedRuntime]:
    """Let CPU tensors be on the simulated GPU."""
    with on_cpu_tensors() as simulated:
        yield simulated


def on_gpu(module: nn.Module, **options: object) -> DDP:
    """Wrap a copy of a module that is on the simulated GPU."""
    wrapped = DDP(copy.deepcopy(module), **options)
    assert all(bucket.on_gpu or bucket.sparse for bucket in wrapped.reducer.buckets)
    return wrapped


@pytest.fixture
def streams(gpu: SimulatedRuntime) -> Iterator[list[Stream]]:
    """Return three streams, the first of them the current one."""
    made = [Stream(gpu, 0) for _ in range(3)]
    with gpu.use_stream(made[0]), InOrderOfStream(*made):
        yield made
    for stream in made:
        stream.synchronize()


def _late(gpu: SimulatedRuntime, stream: Stream, parameter: Tensor, extra: Tensor) -> object:
    """Let a slow kernel on a stream finish the gradient, before our hook sees it."""
    return parameter.register_post_accumulate_grad_hook(
        lambda p: gpu.add(stream.address, p.grad, extra, 0.05)
    )


def test_gradients_in_the_bucket_that_are_made_late(gpu, streams):
    """Nothing is copied in: the transport alone waits for the kernel."""
    module = GivenGradients(a=torch.zeros(3), b=torch.zeros(3))
    extra = torch.tensor([1.0, 2.0, 3.0]) * (RANK + 1)
    _late(gpu, streams[0], module.a, extra)
    wrapped = DDP(module, gradient_as_bucket_view=True)
    mean = torch.tensor([1.0, 2.0, 3.0]) * (SIZE + 1) / 2
    for _ in range(STEPS):
        wrapped.zero_grad(set_to_none=False)
        wrapped({"a": torch.ones(3), "b": torch.ones(3)}).backward()
        streams[0].synchronize()
        with together():
            assert_close(module.a.grad, mean + 1, "a")


def test_gradients_of_several_streams(gpu, streams, views):
    """What launches the bucket waits for the kernels of the others."""
    module = GivenGradients(a=torch.zeros(3), b=torch.zeros(3), c=torch.zeros(3))
    extra = torch.tensor([1.0, 2.0, 3.0]) * (RANK + 1)
    entered = contextlib.ExitStack()

    def make_on(stream: Stream) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            entered.enter_context(gpu.use_stream(stream))
            gpu.add(stream.address, parameter.grad, extra, 0.05)

        return hook

    for name, stream in (("a", streams[1]), ("b", streams[2])):
        module.get_parameter(name).register_post_accumulate_grad_hook(make_on(stream))
    wrapped = DDP(module, gradient_as_bucket_view=views)
    nodes = [
        call_behind_wrapper(module.get_parameter(name), lambda _: entered.close()) for name in "ab"
    ]
    mean = torch.tensor([1.0, 2.0, 3.0]) * (SIZE + 1) / 2
    for step in range(STEPS):
        wrapped.zero_grad(set_to_none=step < 1)
        # In the reverse order: c comes last, on the first stream.
        wrapped({name: torch.ones(3) for name in "cba"}).backward()
        streams[0].synchronize()
        with together():
            for name, extra_mean in (("a", mean), ("b", mean), ("c", 0 * mean)):
                assert_close(module.get_parameter(name).grad, extra_mean + 1, name)
    assert len(nodes) == 2


def test_memory_goes_back_to_its_stream_after_the_copy(gpu):
    """A stream whose gradient was copied on another one waits for that copy."""
    made = [Stream(gpu, 0) for _ in range(2)]
    module = GivenGradients(a=torch.zeros(3), b=torch.zeros(3))
    stack = contextlib.ExitStack()
    module.a.register_post_accumulate_grad_hook(
        lambda _: stack.enter_context(gpu.use_stream(made[1]))
    )
    module.b.register_post_accumulate_grad_hook(lambda _: gpu.hold(made[0].address))
    wrapped = DDP(module, gradient_as_bucket_view=True)
    nodes = [call_behind_wrapper(module.a, lambda _: stack.close())]
    passed = []

    def look(_: Tensor) -> None:
        event = Event(gpu, 0)
        event.record(made[1].address)
        time.sleep(0.05)  # if it does not wait, it is there by then
        passed.append(event.query())
        gpu.release()

    nodes.append(call_behind_wrapper(module.b, look))
    with gpu.use_stream(made[0]):
        wrapped({name: torch.ones(3) for name in "ba"}).backward()
    for stream in made:
        stream.synchronize()
    with together():
        assert passed == [False]


@pytest.mark.essential
def test_the_stream_of_backward_waits_for_the_means(gpu, streams):
    """And the host does not."""
    module = mlp(3, 4, 2)
    wrapped = DDP(module, gradient_as_bucket_view=True)
    x = torch.randn(2 * SIZE, 3, dtype=torch.float64)
    expected = mean_of_ranks(module, lambda model, rank: loss_of(model, share(x, rank)))
    loss = loss_of(wrapped, share(x))
    read = {name: torch.empty_like(p) for name, p in module.named_parameters()}
    gpu.hold_copies(to_device=True)
    loss.backward()
    for name, parameter in module.named_parameters():
        # What a kernel of the caller's stream sees.
        gpu.copy(streams[0].address, read[name], parameter.grad)
    event = Event(gpu, 0)
    event.record(streams[0].address)
    time.sleep(0.05)
    too_early = event.query()
    gpu.hold_copies()
    gpu.release()
    streams[0].synchronize()
    with together():
        assert not too_early
        assert_gradients_close(read, expected)


@pytest.mark.parametrize("how", ["copies", "hook", "compressed", "joined"])
def test_what_is_done_with_the_means_waits_for_them(how, gpu, streams):
    """All that follows the transport is in order of the stream."""
    wrapped = DDP(mlp(3, 4, 2, dtype=torch.float32), gradient_as_bucket_view=how != "copies")
    module = wrapped.module
    if how == "compressed":
        wrapped.register_comm_hook(None, compression.bf16)
    elif how == "hook":
        wrapped.register_comm_hook(None, mean_by_hook)
    gpu.set_delays(to_host=0.02, to_device=0.05)
    x = torch.randn(2 * SIZE, 3)

    def loss(model: nn.Module, rank: int) -> Tensor:
        return loss_of(model, share(x, rank))

    for _ in range(STEPS):
        expected = mean_of_ranks(module, loss)
        wrapped.zero_grad()
        with wrapped.join(enable=how == "joined"):
            loss(wrapped, RANK).backward()
        streams[0].synchronize()
        with together():
            rounding = 0.02 if how == "compressed" else 0
            assert_gradients_close(gradients_of(wrapped), expected, rounding=rounding)

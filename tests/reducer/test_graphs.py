"""Graphs of many kinds give the same gradients, or none, in our class and in torch's on Gloo."""

import copy
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import mlp
from replicas import (
    RANK,
    SIZE,
    assert_close,
    assert_gradients_close,
    assert_replicated,
    gradients_of,
    lies_in_buckets,
    mean_of_ranks,
    together,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from mpiddp import DistributedDataParallel as DDP

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides"),
]

STEPS = 4

Step = Callable[[nn.Module, int, Tensor], None]


class Layers(nn.Module):
    """Linear layers for a function that is given to each forward call."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(count))

    def forward(self, graph: Callable[..., Any], *inputs: Any) -> Any:
        return graph(self.layers, *inputs)


def scalar(output: Tensor) -> Tensor:
    return output.square().mean()


def chain(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x).tanh()
    return x


def idle_output(model: nn.Module, step: int, x: Tensor) -> None:
    outputs = model(lambda layers, x: [layer(x) for layer in layers], x)
    scalar(outputs[0] * outputs[2]).backward()


def output_idle_on_a_rank(model: nn.Module, step: int, x: Tensor) -> None:
    outputs = model(lambda layers, x: [layer(x) for layer in layers], x)
    scalar(outputs[0] * (outputs[1] if step % SIZE == RANK else outputs[2])).backward()


def used_several_times(model: nn.Module, step: int, x: Tensor) -> None:
    scalar(
        model(lambda layers, x: chain([*layers, layers[0], layers[1], layers[0]], x), x)
    ).backward()


def several_forwards(model: nn.Module, step: int, x: Tensor) -> None:
    (scalar(model(chain, x)) + scalar(model(chain, 2 * x)) + scalar(model(chain, -x))).backward()


def several_backwards(model: nn.Module, step: int, x: Tensor) -> None:
    loss = scalar(model(chain, x))
    for _ in range(2):
        loss.backward(retain_graph=True)
    loss.backward()


def several_losses_of_one_forward(model: nn.Module, step: int, x: Tensor) -> None:
    output = model(chain, x)
    output[0].sum().backward(retain_graph=True)
    output[1].sum().backward()


def checkpointed(model: nn.Module, step: int, x: Tensor) -> None:
    def graph(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(chain, [layer, layer], x, use_reentrant=False)
        return x

    scalar(model(graph, x)).backward()


def changing_control_flow(model: nn.Module, step: int, x: Tensor) -> None:
    def graph(layers: nn.ModuleList, x: Tensor) -> Tensor:
        order = [[0], [2, 1], [1, 1, 0], [0, 2]][(step + RANK) % 4]
        return chain([layers[index] for index in order], x)

    scalar(model(graph, x)).backward()


def gradient_without_backward(model: nn.Module, step: int, x: Tensor) -> None:
    parameters = list(model.parameters())
    first = torch.autograd.grad(scalar(model(chain, x)), parameters, create_graph=True)
    slope = sum(gradient.square().sum() for gradient in first)
    assert all(g is not None for g in torch.autograd.grad(slope, parameters))
    scalar(model(chain, x)).backward()


def gradient_of_the_input_in_the_loss(model: nn.Module, step: int, x: Tensor) -> None:
    x.requires_grad_()
    output = model(chain, x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    # The last bias has no part in the slope, but in the output.
    (scalar(output) + slope.square().mean()).backward()


def frozen_after_wrapping(model: nn.Module, step: int, x: Tensor) -> None:
    model.module.layers[1].requires_grad_(step == 0)
    scalar(model(chain, x)).backward()


def zeroed_in_place(model: nn.Module, step: int, x: Tensor) -> None:
    model.zero_grad(set_to_none=False)
    scalar(model(chain, x)).backward()


def frozen_forward_between(model: nn.Module, step: int, x: Tensor) -> None:
    with torch.no_grad():
        model(chain, x)
    model.eval()
    scalar(model(chain, x)).backward()
    model.train()


FIND = {"find_unused_parameters": True}

SCENARIOS: dict[str, tuple[Step, Mapping[str, object]]] = {
    step.__name__.replace("_", " "): (step, options)
    for step, options in [
        (idle_output, FIND),
        (output_idle_on_a_rank, FIND),
        (used_several_times, {}),
        (several_forwards, {}),
        (several_backwards, {}),
        (several_losses_of_one_forward, {}),
        (checkpointed, {}),
        (changing_control_flow, FIND),
        (gradient_without_backward, {}),
        (gradient_of_the_input_in_the_loss, {}),
        (frozen_after_wrapping, FIND),
        (zeroed_in_place, {}),
        (frozen_forward_between, {}),
    ]
}


def wrap_both(
    module: nn.Module, group: dist.ProcessGroup, **options: object
) -> tuple[DDP, TorchDDP]:
    return (
        DDP(copy.deepcopy(module), **options),
        TorchDDP(copy.deepcopy(module), process_group=group, **options),
    )


@pytest.mark.essential(keep=5)
@pytest.mark.smoke(keep=1)
@pytest.mark.thorough(keep=9)
@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients(name, views, gloo):
    step_of, options = SCENARIOS[name]
    pair = wrap_both(Layers(), gloo, gradient_as_bucket_view=views, bucket_cap_mb=1e-4, **options)
    for step in range(STEPS):
        x = torch.randn(2, 3, dtype=torch.float64) + RANK
        for model in pair:
            if step != 2:  # then old gradients stay
                model.zero_grad()
            step_of(model, step, x.clone())
        with together():
            assert_gradients_close(*map(gradients_of, pair), 4)


@pytest.mark.mpi(min_size=2)
def test_frozen_without_being_asked_is_an_error(gloo):
    pair = wrap_both(Layers(), gloo)
    x = torch.ones(2, 3, dtype=torch.float64)
    for model in pair:
        model.module.layers[1].requires_grad_(False)
        scalar(model(chain, x)).backward()
        with together(), pytest.raises(RuntimeError, match="find_unused_parameters"):
            model(chain, x)


Pair = namedtuple("Pair", ["first", "second"])  # what a script may return


@dataclass
class Result:
    value: Tensor
    more: dict[str, list[Tensor]] = field(default_factory=dict)
    label: str = "text"


OUTPUTS: dict[str, tuple[Callable[[list[Tensor]], Any], Callable[[Any], list[Tensor]]]] = {
    "namedtuple": (lambda t: Pair(*t[:2]), lambda o: [o.first, o.second]),
    "dict": (lambda t: {"a": t[0], 7: t[2]}, lambda o: [o["a"], o[7]]),
    "dataclass": (lambda t: Result(t[0], {"x": t[1:]}), lambda o: [o.value, *o.more["x"]]),
    "nested": (
        lambda t: {"a": [t[0], (t[1], None, "text")], "b": Pair({"c": t[2]}, 3)},
        lambda o: [o["a"][0], o["a"][1][0], o["b"].first["c"]],
    ),
}


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("find", [False, True], ids=["all used", "find unused"])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs(kind, find, gloo):
    """The same type comes out, and the same gradients of all that it holds."""
    build, parts = OUTPUTS[kind]
    count = 3 if kind in ("dataclass", "nested") else 2
    pair = wrap_both(Layers(3), gloo, find_unused_parameters=find or count < 3)
    for step in range(3):
        x = torch.randn(2, 3, dtype=torch.float64) + RANK
        kinds = []
        for model in pair:
            model.zero_grad()
            output = model(lambda layers, x: build([layer(x) for layer in layers]), x)
            kinds.append(type(output))
            # torch sees no idle output in a dataclass, and then averages nothing.
            idle = find and step == 1 and kind != "dataclass"
            taken = parts(output)[: 1 if idle else None]
            sum(scalar(part) for part in taken).backward()
        with together():
            assert kinds[0] is kinds[1]
            assert_gradients_close(*map(gradients_of, pair), 4)


def test_idle_output_in_a_dataclass(views):
    model = Layers(2)
    wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    inputs = torch.randn(SIZE, 2, 3, dtype=torch.float64)

    def loss(module: nn.Module, rank: int) -> Tensor:
        result = module(lambda layers, x: Result(layers[0](x), {"x": [layers[1](x)]}), inputs[rank])
        return scalar(result.value)

    for _ in range(3):
        expected = mean_of_ranks(model, loss)
        wrapped.zero_grad()
        loss(wrapped, RANK).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), expected)
            assert expected["layers.1.weight"] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_of_16_bits(dtype, views, gloo):
    pair = wrap_both(mlp(4, 5, 2, dtype=dtype), gloo, gradient_as_bucket_view=views)
    for _ in range(3):
        x = torch.randn(3, 4, dtype=dtype) + RANK
        for model in pair:
            model.zero_grad()
            scalar(model(x)).backward()
        with together():
            # Gloo adds in 16 bits.
            assert_gradients_close(*map(gradients_of, pair), 2)
        assert_replicated(pair[0])


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(9, 4, sparse=True, mode="sum")
        self.dense = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.dense(self.words(tokens))
        return y


def test_embedding_bag_with_sparse_gradients(gloo):
    pair = wrap_both(_Bag(), gloo)
    for step in range(3):
        tokens = torch.tensor([[RANK, RANK, 8], [step, (RANK + step) % 9, 1]])
        for model in pair:
            model.zero_grad()
            scalar(model(tokens)).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair), 2)


@pytest.mark.essential
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_clipping_and_gradient_scaler(gloo):
    """AMP with gradients that are views: the same clipped steps, none where one overflows."""
    pair = wrap_both(mlp(4, 8, 2, dtype=torch.float32), gloo, gradient_as_bucket_view=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in pair]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in pair]
    norms: list[list[float]] = [[], []]
    for step in range(5):
        x = torch.randn(3, 4) + RANK
        if step == 2 and RANK == SIZE - 1:
            x[0, 0] = float("inf")  # overflows on one rank
        for index, model in enumerate(pair):
            optimizers[index].zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = scalar(model(x).float())
            scalers[index].scale(loss).backward()
            scalers[index].unscale_(optimizers[index])
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            norms[index].append(float(norm))
            scalers[index].step(optimizers[index])
            scalers[index].update()
        with together():
            assert scalers[0].get_scale() == scalers[1].get_scale()
            ours, theirs = (dict(model.named_parameters()) for model in pair)
            for name, parameter in ours.items():
                assert_close(parameter, theirs[name], name, 4)
    with together():
        assert norms[0] == pytest.approx(norms[1], rel=1e-4, nan_ok=True)
        assert norms[0][2] != norms[0][2] or norms[0][2] == float("inf")
        assert scalers[0].get_scale() == 2.0**9
        for parameter in pair[0].parameters():  # clipped in place: still the bucket's memory
            assert lies_in_buckets(pair[0], parameter.grad)
    assert_replicated(pair[0])


class _Many(nn.Module):
    """Very many small parameters, some without an element."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.full((index % 3,), 0.1) for index in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([*self.parts]).square().sum() * x


def test_very_many_parameters_and_empty_ones():
    model = _Many(10_000)
    wrapped = DDP(model, gradient_as_bucket_view=True)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.tensor(RANK + 1.0)).backward()
        with together():
            gradient = torch.cat([p.grad for p in model.parameters()])
            assert_close(gradient, torch.full_like(gradient, 0.1 * (SIZE + 1)), "all gradients")


def test_some_parameters_and_empty_ones(views, gloo):
    pair = wrap_both(_Many(200), gloo, gradient_as_bucket_view=views)
    for _ in range(2):
        for model in pair:
            model.zero_grad()
            model(torch.tensor(RANK + 1.0)).backward()
        with together():
            ours, theirs = (torch.cat([p.grad for p in model.parameters()]) for model in pair)
            assert_close(ours, theirs, "all gradients")


def test_only_parameters_without_an_element(views, gloo):
    pair = wrap_both(_Many(1), gloo, gradient_as_bucket_view=views)
    for _ in range(2):
        for model in pair:
            model.zero_grad()
            model(torch.tensor(1.0)).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair))

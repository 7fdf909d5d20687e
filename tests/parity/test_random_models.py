"""Models drawn at random train on N ranks as one process says they should."""

import copy
from dataclasses import dataclass, replace
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from replicas import (
    RANK,
    SIZE,
    assert_close,
    assert_gradients_close,
    assert_replicated,
    drawn_together,
    gather,
    gradients_of,
    mean_of_ranks,
    share,
    together,
)
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
]

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EXAMPLES = 40 if SIZE <= 2 else 20


@dataclass(frozen=True)
class Layer:
    """How to make one layer of a drawn model.

    Attributes:
        kind: what it is made of.
        width: the size of something inside of it.
        dtype: of its parameters.
        shared: the earlier layer whose place it takes, of those before it; None is a layer
            of its own.
    """

    kind: str
    width: int
    dtype: torch.dtype
    shared: int | None


LAYERS = st.builds(
    Layer,
    kind=st.sampled_from(["linear", "transposed", "sliced", "scale", "convolution", "bare"]),
    width=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    shared=st.none() | st.none() | st.integers(0, 5),
)


class _Piece(nn.Module):
    """A layer that takes any number of values a row and returns three."""

    def __init__(self, plan: Layer) -> None:
        super().__init__()
        self.plan = plan
        width, dtype = plan.width, plan.dtype
        if plan.kind == "linear":
            self.inner: nn.Module | None = nn.Linear(3, width, dtype=dtype)
            self.outer = nn.Parameter(torch.randn(width, 3, dtype=dtype))
        elif plan.kind == "transposed":
            self.outer = nn.Parameter(torch.randn(3, 3, dtype=dtype).t())
        elif plan.kind == "sliced":
            self.outer = nn.Parameter(torch.randn(3, 6, dtype=dtype)[:, ::2])
        elif plan.kind == "convolution":
            self.inner = nn.Conv2d(3, 3, (2, 1 + width % 2), padding=1, dtype=dtype).to(
                memory_format=torch.channels_last
            )
        elif plan.kind == "scale":
            self.outer = nn.Parameter(torch.randn((), dtype=dtype))
            self.empty = nn.Parameter(torch.randn(width, 0, dtype=dtype))
        else:
            self.outer = nn.Parameter(torch.randn(width, 3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.plan.dtype)
        if self.plan.kind == "linear":
            assert self.inner is not None
            x = (self.inner(x) @ self.outer) / max(self.plan.width, 1)
        elif self.plan.kind in ("transposed", "sliced"):
            x = x @ self.outer
        elif self.plan.kind == "convolution":
            assert self.inner is not None
            x = self.inner(x[:, :, None, None]).sum((2, 3))
        elif self.plan.kind == "scale":
            x = x * self.outer + self.empty.sum()
        else:
            # The gradient of a sum is expanded from a single number.
            x = x + 0.1 * self.outer.sum()
        return x.tanh()


class Drawn(nn.Module):
    """A chain of drawn layers; a forward call may leave some out."""

    def __init__(self, plan: list[Layer]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList()
        for index, layer in enumerate(plan):
            if layer.shared is not None and layer.shared < index:
                self.pieces.append(self.pieces[layer.shared])
            else:
                self.pieces.append(_Piece(layer))
        self.head = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: Tensor, used: list[bool]) -> Tensor:
        for piece, wanted in zip(self.pieces, used, strict=True):
            if wanted:
                x = piece(x)
        return (x.double() @ self.head).square().mean()


@dataclass(frozen=True)
class Plan:
    """A drawn model, how it is wrapped, and which rank uses which layer at which step."""

    layers: list[Layer]
    seed: int
    cap: float | None
    views: bool
    to_none: list[bool]
    accumulate: list[int]
    unused: list[list[list[bool]]] | None  # step, rank, layer

    @property
    def steps(self) -> int:
        return len(self.to_none)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layers = draw(st.lists(LAYERS, min_size=1, max_size=6))
    steps = 3
    some = st.lists(
        st.lists(
            st.lists(st.booleans(), min_size=len(layers), max_size=len(layers)),
            min_size=SIZE,
            max_size=SIZE,
        ),
        min_size=steps,
        max_size=steps,
    )
    return Plan(
        layers=layers,
        seed=draw(st.integers(0, 2**16)),
        cap=draw(st.sampled_from([None, 0, 1e-5, 1e-4, 3e-4, 1e-3, 100])),
        views=draw(st.booleans()),
        to_none=draw(st.lists(st.booleans(), min_size=steps, max_size=steps)),
        accumulate=draw(st.lists(st.integers(0, 2), min_size=steps, max_size=steps)),
        unused=draw(st.none() | some),
    )


@pytest.mark.essential
@given(plan=plans())
@drawn_together(EXAMPLES)
def test_gradients_are_the_mean_of_all_ranks(plan):
    assert len(set(gather(repr(plan)))) == 1, "the ranks drew different models"
    torch.manual_seed(plan.seed)
    model = Drawn(plan.layers)
    wrapped = DDP(
        model,
        bucket_cap_mb=plan.cap,
        gradient_as_bucket_view=plan.views,
        find_unused_parameters=plan.unused is not None,
    )
    for step in range(plan.steps):
        rows = torch.randn(plan.accumulate[step] + 1, SIZE, 2, 3)

        def used(rank: int, step: int = step) -> list[bool]:
            return plan.unused[step][rank] if plan.unused else [True] * len(plan.layers)

        def micro_loss(module: nn.Module, rank: int, index: int, rows: Tensor = rows) -> Tensor:
            loss: Tensor = module(rows[index, rank], used(rank))
            return loss

        def losses(module: nn.Module, rank: int, count: int = len(rows)) -> Tensor:
            return sum((micro_loss(module, rank, i) for i in range(count)), torch.zeros(()))

        # A copy without gradients would hide what old ones do; so the mean over ranks comes
        # from a fresh copy, and what lay in .grad from the test itself.
        expected = mean_of_ranks(model, losses)
        wrapped.zero_grad(set_to_none=plan.to_none[step])
        before = {name: p.grad is not None for name, p in model.named_parameters()}
        for index in range(plan.accumulate[step]):
            with wrapped.no_sync():
                micro_loss(wrapped, RANK, index).backward()
        micro_loss(wrapped, RANK, plan.accumulate[step]).backward()
        for name, gradient in expected.items():
            if gradient is None and before[name]:
                expected[name] = torch.zeros_like(model.get_parameter(name))
        with together():
            # Micro-batches are added in the parameter's dtype.
            assert_gradients_close(gradients_of(wrapped), expected, 2 * len(rows))
        assert_replicated(wrapped)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)


@given(plan=plans(), optimizer=st.sampled_from(["SGD", "Adam", "AdamW"]))
@drawn_together(EXAMPLES // 2)
def test_parameters_after_training(plan, optimizer):
    """In double precision, where the whole batch on one process is the truth."""
    torch.manual_seed(plan.seed)
    model = Drawn([replace(layer, dtype=torch.float64) for layer in plan.layers])
    alone = copy.deepcopy(model)
    wrapped = DDP(model, bucket_cap_mb=plan.cap, gradient_as_bucket_view=plan.views)
    make = {
        "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "Adam": partial(torch.optim.Adam, lr=0.01, eps=1e-3),
        "AdamW": partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
    }[optimizer]
    optimizers = [make(module.parameters()) for module in (wrapped, alone)]
    everything = [True] * len(plan.layers)
    for step in range(plan.steps):
        rows = torch.randn(2 * SIZE, 3, dtype=torch.float64)
        for module, stepper, part in zip(
            (wrapped, alone), optimizers, (share(rows), rows), strict=True
        ):
            stepper.zero_grad(set_to_none=plan.to_none[step])
            module(part, everything).backward()
            stepper.step()
        assert_replicated(wrapped)
    with together():
        for name, parameter in model.named_parameters():
            assert_close(parameter, alone.get_parameter(name), name, 1e3)

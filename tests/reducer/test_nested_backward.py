"""Forward and backward of a wrapped module inside of another backward: averaged, as by torch's."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from replicas import RANK, assert_gradients_close, assert_replicated, gradients_of, together
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi(min_size=2)

OPTIONS = {
    "unused": {"find_unused_parameters": True},
    "views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "small buckets": {"find_unused_parameters": True, "bucket_cap_mb": 1e-5},
}


class Partly(nn.Module):
    """A layer that is used, one that is not, and one below a reentrant checkpoint if that is."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant:
            x = checkpoint(self.layers[2], x, use_reentrant=True)
        y: Tensor = self.layers[0](x)
        return y


class Box:
    """An output in which no tensor is found."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Boxed(Partly):
    """The same, whose output is found by nobody."""

    def forward(self, x: Tensor) -> Box:  # type: ignore[override]
        return Box(super().forward(x))


Nest = Callable[[Callable[[], None]], None]


def in_hook_of_leaf(inner: Callable[[], None]) -> None:
    outer = torch.ones(1, requires_grad=True)
    outer.register_hook(lambda _: inner())
    outer.sum().backward()


def in_hook_of_result(inner: Callable[[], None]) -> None:
    outer = torch.ones(1, requires_grad=True) * 3
    outer.register_hook(lambda _: inner())
    (outer * 2).sum().backward()


class Replay(torch.autograd.Function):
    """What gradient caching does: its backward runs a forward and a backward of its own."""

    @staticmethod
    def forward(ctx, x, inner):
        ctx.inner = inner
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.inner()
        return gradient, None


def in_function(inner: Callable[[], None]) -> None:
    Replay.apply(torch.ones(1, requires_grad=True), inner).sum().backward()


def twice_nested(inner: Callable[[], None]) -> None:
    def between() -> None:
        with torch.enable_grad():
            in_function(inner)

    in_hook_of_leaf(between)


@pytest.mark.thorough(keep=6)
@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("nest", [in_hook_of_leaf, in_hook_of_result, in_function, twice_nested])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_averaged_when_the_inner_backward_ends(options, nest, gloo):
    module = Partly()
    pair = (
        DDP(copy.deepcopy(module), **options),
        TorchDDP(copy.deepcopy(module), process_group=gloo, **options),
    )
    for step in range(4):
        for model in pair:
            model.zero_grad()

            def inner(model: nn.Module = model, step: int = step) -> None:
                with torch.enable_grad():
                    model(torch.ones(2, 3) * (1 + RANK + step)).sum().backward()

            nest(inner)
        with together():
            assert_gradients_close(*map(gradients_of, pair))
        assert_replicated(pair[0])


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("nest", [in_hook_of_leaf, twice_nested])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_averaged_where_no_output_is_found(options, nest, gloo):
    """Where parameters may be unused torch refuses it: its class is given what it finds."""
    model = DDP(Boxed(), **options)
    theirs = TorchDDP(copy.deepcopy(model.module), process_group=gloo, find_unused_parameters=True)
    theirs.module.__class__ = Partly
    for step in range(3):

        def inner(step: int = step) -> None:
            with torch.enable_grad():
                x = torch.ones(2, 3) * (1 + RANK + step)
                model(x).tensor.sum().backward()
                theirs(x).sum().backward()

        model.zero_grad()
        theirs.zero_grad()
        nest(inner)
        with together():
            assert_gradients_close(gradients_of(model), gradients_of(theirs))
        assert_replicated(model)


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("synchronised", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_several_inner_passes_of_one_step(options, synchronised, gloo):
    """Gradient caching replays each part of a batch; only the last one need be averaged."""
    if not synchronised and "static_graph" in options:
        pytest.skip("torch's class refuses it")
    module = Partly()
    pair = (
        DDP(copy.deepcopy(module), **options),
        TorchDDP(copy.deepcopy(module), process_group=gloo, **options),
    )
    for step in range(3):
        for model in pair:
            model.zero_grad()

            def inner(model: nn.Module = model, step: int = step) -> None:
                for part in range(3):
                    alone = not synchronised and part < 2
                    with torch.enable_grad(), model.no_sync() if alone else nullcontext():
                        model(torch.ones(2, 3) * (1 + RANK + step + part)).sum().backward()

            in_function(inner)
        with together():
            assert_gradients_close(*map(gradients_of, pair))
        if synchronised:
            assert_replicated(pair[0])


@pytest.mark.parametrize("outside", [True, False])
def test_mixed_precision_gives_parameters_back(outside):
    """Those that have no gradient too: else a state dict would hold them rounded."""
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = DDP(Partly(), find_unused_parameters=True, mixed_precision=config)

    def forward() -> Tensor:
        loss: Tensor = model(torch.ones(2, 3) * (1 + RANK)).float().sum()
        return loss

    def inner() -> None:
        with torch.enable_grad():
            (loss if outside else forward()).backward()

    loss = forward() if outside else torch.zeros(())
    in_function(inner)
    with together():
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_replicated(model)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_forward_outside_and_backward_within(options, gloo):
    module = Partly()
    pair = (
        DDP(copy.deepcopy(module), **options),
        TorchDDP(copy.deepcopy(module), process_group=gloo, **options),
    )
    for _ in range(3):
        for model in pair:
            model.zero_grad()
            loss = model(torch.ones(2, 3) * (1 + RANK)).sum()
            in_function(loss.backward)
        with together():
            assert_gradients_close(*map(gradients_of, pair))
        assert_replicated(pair[0])


@pytest.mark.parametrize("nest", [in_hook_of_leaf, in_function])
def test_reentrant_checkpoint_within_does_not_end_it(nest, gloo):
    """The end of the checkpoint's own pass is not that of the backward around it."""
    module = Partly(reentrant=True)
    options = {"static_graph": True}
    pair = (
        DDP(copy.deepcopy(module), **options),
        TorchDDP(copy.deepcopy(module), process_group=gloo, **options),
    )
    for _ in range(3):
        for model in pair:
            model.zero_grad()

            def inner(model: nn.Module = model) -> None:
                with torch.enable_grad():
                    x = (torch.ones(2, 3) * (1 + RANK)).requires_grad_()
                    model(x).sum().backward()

            nest(inner)
        with together():
            assert_gradients_close(*map(gradients_of, pair))
        assert_replicated(pair[0])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_whole_wrapper_in_reentrant_checkpoint(options, gloo):
    if "static_graph" in options:
        pytest.skip("torch's class forgets what it has learned in the forward without gradients")
    module = Partly()
    pair = (
        DDP(copy.deepcopy(module), **options),
        TorchDDP(copy.deepcopy(module), process_group=gloo, **options),
    )
    for _ in range(3):
        for model in pair:
            model.zero_grad()
            x = (torch.ones(2, 3) * (1 + RANK)).requires_grad_()
            checkpoint(model, x, use_reentrant=True).sum().backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair))
        assert_replicated(pair[0])

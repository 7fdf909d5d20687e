"""torch's `mixed_precision` argument on the CPU, against one process that casts by hand."""

import copy
from typing import Any

import pytest
import torch
from models import mlp
from replicas import RANK, SIZE, assert_replicated, gather, together
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


class Model(nn.Module):
    """A network with a buffer, a frozen parameter and a layer that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 8, 4, dtype=FULL)
        self.extra = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("shift", torch.randn(4))
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor, extra: bool = True) -> Tensor:
        self.seen = {x.dtype, *(parameter.dtype for parameter in self.parameters())}
        x = self.net(x)
        if extra:
            x = self.extra(x)
        return x * self.frozen + self.shift.to(x.dtype)


def by_hand(model: Model, batches: list[Tensor], dtype: torch.dtype, **options: Any) -> list[Any]:
    """Return the mean over batches of the gradients of a copy that was cast."""
    gradients = []
    for batch in batches:
        narrow = copy.deepcopy(model).to(dtype)
        narrow.zero_grad()
        narrow(batch.to(dtype), **options).square().sum().backward()
        gradients.append([parameter.grad for parameter in narrow.parameters()])
    return [
        None if of_one[0] is None else torch.stack([each.float() for each in of_one]).mean(0)
        for of_one in zip(*gradients, strict=True)
    ]


def assert_as_by_hand(model: nn.Module, expected: list[Any], rounding: float) -> None:
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.dtype is FULL
        if gradient is None:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            assert parameter.grad.dtype is FULL
            torch.testing.assert_close(parameter.grad, gradient, rtol=rounding, atol=rounding)


@pytest.mark.essential(keep=4)
@pytest.mark.smoke(keep=1)
@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("reduced_as", [None, HALF, BRAIN, FULL], ids=str)
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_same_as_by_hand(
    dtype: torch.dtype, reduced_as: torch.dtype | None, set_to_none: bool, views: bool
) -> None:
    model = Model()
    config = _MixedPrecision(param_dtype=dtype, reduce_dtype=reduced_as)
    wrapped = DDP(model, mixed_precision=config, gradient_as_bucket_view=views, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        batches = list(torch.randn(SIZE, 5, 3))
        expected = by_hand(model, batches, dtype)
        optimizer.zero_grad(set_to_none=set_to_none)
        wrapped(batches[RANK]).square().sum().backward()
        wire = reduced_as or dtype
        with together():
            assert model.seen == {dtype}
            rounding = {FULL: 1e-5, HALF: 1e-3, BRAIN: 1e-2}[wire]
            assert_as_by_hand(model, expected, rounding)
        assert_replicated(wrapped)
        optimizer.step()


def test_accumulated_gradients(views: bool) -> None:
    """Those of `no_sync` are added in the parameters' own dtype."""
    model = Model()
    wrapped = DDP(
        model,
        mixed_precision=_MixedPrecision(param_dtype=HALF, reduce_dtype=FULL),
        gradient_as_bucket_view=views,
    )
    for _ in range(3):
        first, second = torch.randn(2, SIZE, 5, 3)
        expected = [
            None if one is None else one + other
            for one, other in zip(
                by_hand(model, list(first), HALF), by_hand(model, list(second), HALF), strict=True
            )
        ]
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(first[RANK]).square().sum().backward()
        wrapped(second[RANK]).square().sum().backward()
        with together():
            assert_as_by_hand(model, expected, 1e-5)


def test_unused_parameters(views: bool) -> None:
    model = Model()
    wrapped = DDP(
        model,
        mixed_precision=_MixedPrecision(param_dtype=HALF, reduce_dtype=FULL),
        gradient_as_bucket_view=views,
        find_unused_parameters=True,
    )
    for step in range(4):
        batches = list(torch.randn(SIZE, 5, 3))
        used = step % 2 == 0
        expected = by_hand(model, batches, HALF, extra=used)
        wrapped.zero_grad()
        wrapped(batches[RANK], extra=used).square().sum().backward()
        with together():
            assert_as_by_hand(model, expected, 1e-5)


@pytest.mark.essential
def test_buffers_and_ignored_parameters() -> None:
    model = Model()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["extra.weight", "extra.bias"])
    config = _MixedPrecision(param_dtype=HALF, buffer_dtype=BRAIN)
    wrapped = DDP(model, mixed_precision=config)
    wrapped(torch.randn(5, 3), extra=False).sum().backward()
    with together():
        assert model.shift.dtype is BRAIN
        assert model.seen == {HALF, FULL}
        assert model.extra.weight.dtype is FULL
        assert model.extra.weight.grad is None
        assert model.net[0].weight.grad.dtype is FULL


def test_without_gradients_nothing_stays_narrow() -> None:
    model = Model()
    wrapped = DDP(model, mixed_precision=_MixedPrecision(param_dtype=HALF))
    before = [parameter.clone() for parameter in model.parameters()]
    with torch.no_grad():
        output = wrapped(torch.randn(5, 3))
    with together():
        assert output.dtype is HALF
        for parameter, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, value)
            assert parameter.dtype is FULL


def test_copies() -> None:
    wrapped = DDP(Model(), mixed_precision=_MixedPrecision(param_dtype=HALF, reduce_dtype=FULL))
    for each in (wrapped, copy.deepcopy(wrapped)):
        batches = list(torch.randn(SIZE, 5, 3))
        expected = by_hand(each.module, batches, HALF)
        each(batches[RANK]).square().sum().backward()
        with together():
            assert_as_by_hand(each.module, expected, 1e-5)


def test_another_hook_is_refused() -> None:
    from mpiddp import compression

    wrapped = DDP(Model(), mixed_precision=_MixedPrecision(param_dtype=HALF))
    with together(), pytest.raises(RuntimeError, match="can only be called once"):
        wrapped.register_comm_hook(None, compression.fp16)


@pytest.mark.mpi(min_size=2)
def test_different_configurations_are_an_error() -> None:
    dtype = HALF if RANK == 0 else BRAIN
    with pytest.raises(RuntimeError, match="mixed_precision") as raised:
        DDP(Model(), mixed_precision=_MixedPrecision(param_dtype=dtype))
    assert len(set(gather(str(raised.value)))) >= 1

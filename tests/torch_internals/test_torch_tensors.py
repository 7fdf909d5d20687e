"""Gradients that are read and set by torch's C functions are those that Python sees."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from replicas import RANK, SIZE, all_bits, assert_replicated, gradients_of, together
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.torch_internals import tensors

LAYOUTS = {
    "plain": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "expanded": lambda tensor: tensor[:1].expand(tensor.shape),
    "part of another": lambda tensor: torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]],
    "negated": lambda tensor: torch.complex(tensor, -tensor).conj().imag,
    "zeros without memory": lambda tensor: torch._efficientzerotensor(tensor.shape),
}


class Arriving(torch.autograd.Function):
    """Zero, with the gradient that `make` returns, which nobody else holds."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make = make
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.make(), None


class OneParameter(nn.Module):
    """A parameter that gets the gradients which the forward call makes."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(shape))

    def forward(self, make: Callable[[], Tensor]) -> Tensor:
        result: Tensor = Arriving.apply(self.parameter, make)
        return result


@pytest.mark.smoke
def test_within_reach():
    """With this torch nothing keeps the fast way shut: it would be missed by nobody but a clock."""
    assert tensors.within_reach()


@pytest.fixture(params=[False, True], ids=["c", "python"])
def in_python(request: pytest.FixtureRequest) -> Iterator[bool]:
    tensors.stay_in_python(request.param)
    yield request.param
    tensors.stay_in_python(False)


@pytest.mark.smoke
def test_can_be_kept_in_python(in_python):
    assert tensors.within_reach() is not in_python


@pytest.mark.essential(keep=6)
@pytest.mark.smoke(keep=1)
@pytest.mark.mpi
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, views, in_python):
    """The mean of gradients in every layout that autograd may leave."""
    values = torch.arange(12.0).reshape(3, 4)
    model = OneParameter(3, 4)
    if layout == "zeros without memory":
        views = True  # torch cannot write a mean into such a tensor, nor could its own class
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for step in range(3):
        made = [LAYOUTS[layout](values * (rank + 1 + step)) for rank in range(SIZE)]
        wrapped.zero_grad()
        # Made anew: of what the test holds, autograd keeps a copy in another layout.
        wrapped(lambda step=step: LAYOUTS[layout](values * (RANK + 1 + step))).backward()
        with together():
            torch.testing.assert_close(model.parameter.grad, torch.stack(made).mean(0))


@pytest.mark.essential(keep=1)
@pytest.mark.mpi
def test_channels_last(views, in_python):
    """Strides that are not those of a contiguous tensor, with a dimension of one."""
    torch.manual_seed(RANK)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 1, 1)).to(
        memory_format=torch.channels_last
    )
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.randn(2, 3, 5, 5)).square().sum().backward()
        assert_replicated(wrapped)


@pytest.mark.essential
@pytest.mark.mpi
def test_both_ways_give_the_same_bits(views):
    results = []
    for in_python in (False, True):
        tensors.stay_in_python(in_python)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        wrapped = DDP(model, gradient_as_bucket_view=views)
        for step in range(4):
            if step != 2:  # accumulated
                wrapped.zero_grad(set_to_none=step != 3)
            torch.manual_seed(10 * step + RANK)
            wrapped(torch.randn(4, 5)).square().sum().backward()
        results.append(all_bits(gradients_of(wrapped).items()))
    tensors.stay_in_python(False)
    with together():
        assert results[0] == results[1]


@pytest.mark.essential(keep=1)
@pytest.mark.mpi
def test_gradient_that_others_hold(views, in_python):
    """A hook has seen the gradient, and a later one replaces it; all objects live on."""
    model = OneParameter(4)
    seen: list[Tensor] = []
    model.parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    wrapped = DDP(model, gradient_as_bucket_view=views)

    def replace(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad + 1

    model.parameter.register_post_accumulate_grad_hook(replace)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(lambda step=step: torch.full((4,), float(RANK + step))).backward()
        mean = sum(rank + step + 1 for rank in range(SIZE)) / SIZE
        with together():
            assert model.parameter.grad.tolist() == [mean] * 4
            assert seen[-1].tolist() == [RANK + step] * 4


@pytest.mark.essential(keep=1)
@pytest.mark.mpi
def test_data_that_was_replaced(views, in_python):
    """A parameter whose memory is another one since the model was wrapped."""
    model = nn.Linear(3, 2)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for step in range(3):
        model.weight.data = torch.full((2, 3), 1.0 + step)
        wrapped.zero_grad()
        wrapped(torch.full((1, 3), float(RANK))).sum().backward()
        with together():
            assert model.weight.grad.tolist() == [[(SIZE - 1) / 2] * 3] * 2


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning")
def test_gradient_of_the_user_in_another_layout(views, in_python):
    """Autograd adds to what is there, whose strides may be others than the parameter's."""
    model = OneParameter(3, 2)
    model.parameter = nn.Parameter(torch.zeros(2, 3).t())
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for _ in range(3):
        model.parameter.grad = torch.arange(6.0).reshape(3, 2)
        wrapped(lambda: torch.full((3, 2), float(RANK))).backward()
        with together():
            expected = torch.arange(6.0).reshape(3, 2) + (SIZE - 1) / 2
            assert torch.equal(model.parameter.grad, expected)

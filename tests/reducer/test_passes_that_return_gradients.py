"""torch.autograd.grad before backward reduces nothing, and what backward brings is averaged."""

import pytest
import torch
from models import mlp
from replicas import RANK, SIZE, gather, together
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

HOW = {
    "plain": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
}


def penalty(model: nn.Module, x: Tensor, way: str) -> Tensor:
    output = model(x)
    if way == "inputs":
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.square().sum() + slope.square().sum()
    if way == "parameters":
        module = model.module if isinstance(model, DDP) else model
        torch.autograd.grad(output.sum(), list(module.parameters()), retain_graph=True)
    elif way == "backward":
        output.sum().backward(inputs=[x], retain_graph=True)
    return output.square().sum()


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("way", ["inputs", "parameters", "backward"])
def test_mean_of_what_backward_brings(how, way, views):
    model, plain = mlp(3, 4, 2), mlp(3, 4, 2)
    wrapped = DDP(model, gradient_as_bucket_view=views, **HOW[how])
    plain.load_state_dict(model.state_dict())
    for step in range(3):
        wrapped.zero_grad()
        inputs = [
            torch.full((2, 3), 1.0 + step + rank, dtype=torch.float64, requires_grad=True)
            for rank in range(SIZE)
        ]
        penalty(wrapped, inputs[RANK], way).backward()
        plain.zero_grad()
        for x in inputs:
            (penalty(plain, x, way) / SIZE).backward()
        with together():
            for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, expected.grad)


def test_output_that_reaches_no_parameter(views):
    """On one rank only: the others wait for its zeros."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2, dtype=torch.float64)

        def forward(self, x: Tensor, used: bool) -> Tensor:
            return self.layer(x).sum() if used else (2 * x).sum()

    wrapped = DDP(Sometimes(), find_unused_parameters=True, gradient_as_bucket_view=views)
    for _ in range(2):
        wrapped.zero_grad()
        x = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
        wrapped(x, RANK == 0).backward()
        gradients = gather([p.grad.flatten().tolist() for p in wrapped.parameters()])
        with together():
            assert gradients == [[[1 / SIZE] * 6, [1 / SIZE] * 2]] * SIZE

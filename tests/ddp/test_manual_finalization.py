"""The end of backward at a moment of the user's: `require_manual_backward_finalization`."""

import copy

import pytest
import torch
from models import loss_of, mlp
from replicas import RANK, SIZE, together
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi

torch_has_it = pytest.mark.skipif(  # torch 2.15 brought it: older ones have nothing to compare with
    not hasattr(TorchDDP, "finalize_backward"), reason="torch 2.15 brought it"
)


def wrapped(net: torch.nn.Module | None = None, **settings: object) -> DDP:
    torch.manual_seed(3)
    model = DDP(mlp(6, 5, 1) if net is None else net, **settings)
    model.require_manual_backward_finalization = True
    return model


def loss(model: torch.nn.Module, batch: int) -> torch.Tensor:
    torch.manual_seed(batch)
    return loss_of(model, torch.randn(4, 6, dtype=torch.float64))


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def test_gradients_are_means_after_it(views):
    model = wrapped(gradient_as_bucket_view=views)
    torch.manual_seed(3)
    plain = DDP(mlp(6, 5, 1), gradient_as_bucket_view=views)
    found = []
    for step in range(4):
        for each in (model, plain):
            each.zero_grad()
            loss(each, step + 10 * RANK).backward()
        model.finalize_backward()
        pairs = zip(gradients(model), gradients(plain), strict=True)
        found.append(all(torch.equal(*pair) for pair in pairs))
    with together():
        assert found == [True] * 4


@torch_has_it
def test_as_torchs_class(gloo):
    answers = []
    for make, settings in ((DDP, {}), (TorchDDP, {"process_group": gloo})):
        torch.manual_seed(3)
        model = make(mlp(6, 5, 1), **settings)
        told = [model.require_manual_backward_finalization, model.should_finalize_after_backward]
        with pytest.raises(RuntimeError):
            model.finalize_backward()
        model.require_manual_backward_finalization = True
        for step in range(3):
            value = loss(model, step + RANK)
            told.append(model.should_finalize_after_backward)
            with pytest.raises(RuntimeError):
                model.finalize_backward()
            with pytest.raises(RuntimeError):
                model.require_manual_backward_finalization = False
            value.backward()
            model.finalize_backward()
            with pytest.raises(RuntimeError):
                model.finalize_backward()
        with model.no_sync():
            loss(model, 7).backward()
            with pytest.raises(RuntimeError):
                model.finalize_backward()
        model.require_manual_backward_finalization = False
        model.zero_grad()
        loss(model, 9 + RANK).backward()
        answers.append((told, gradients(model)))
    (ours, own), (theirs, torchs) = answers
    with together():
        assert ours == theirs
        for one, other in zip(own, torchs, strict=True):
            torch.testing.assert_close(one, other)


class Tail(torch.autograd.Function):
    """The identity, whose backward comes last and calls a function."""

    @staticmethod
    def forward(context, value, call):
        context.call = call
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        context.call()
        return gradient, None


def test_within_backward():
    """Called in backward, below the last parameter, when all buckets are full."""
    model = wrapped(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)))
    reference = DDP(copy.deepcopy(model.module))
    inputs = torch.randn(4, 6) + RANK
    within = []

    def finish() -> None:
        if not model.should_finalize_after_backward:
            model.finalize_backward()
            within.append([gradient.clone() for gradient in gradients(model)])

    for _ in range(3):
        model.zero_grad()
        reference.zero_grad()
        head = torch.zeros(1, requires_grad=True)
        # All parameters have their gradients before the input has.
        model(Tail.apply(inputs + head, finish)).sum().backward()
        if model.reducer.expecting:
            model.finalize_backward()
        reference(inputs).sum().backward()
    with together():
        assert len(within) == 2
        for one, other in zip(within[-1], gradients(reference), strict=True):
            assert torch.equal(one, other)


def test_too_early():
    model = wrapped(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)))
    problems = []

    def finish() -> None:
        try:
            model.finalize_backward()
        except RuntimeError as error:
            problems.append(str(error))

    class Middle(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model.module[1]

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.inner(Tail.apply(value, finish))

    model.module[1] = Middle()
    model(torch.ones(2, 6)).sum().backward()
    model.finalize_backward()
    with together():
        assert len(problems) == 1
        assert "before all gradients are there: 0 of 1 buckets are full" in problems[0]


def test_forgotten():
    model = wrapped()
    loss(model, 1).backward()
    with together(), pytest.raises(RuntimeError, match=f"rank {RANK}: the last backward was not"):
        loss(model, 2)


def test_unused_parameters():
    net = mlp(6, 5, 1)
    net.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    model = wrapped(net, find_unused_parameters=True)
    for step in range(3):
        value = loss(model, step)
        after = model.should_finalize_after_backward
        value.backward()
        model.finalize_backward()
    with together():
        assert after
        assert model.module.unused.grad is None
        assert all(p.grad is not None for n, p in model.module.named_parameters() if n != "unused")


def test_copies_keep_it():
    model = wrapped()
    other = copy.deepcopy(model)
    loss(other, RANK).backward()
    other.finalize_backward()
    with together():
        assert other.require_manual_backward_finalization


@pytest.mark.mpi(min_size=2)
def test_means_are_written_by_it_and_not_before():
    model = wrapped(torch.nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), float(RANK))).sum().backward()
    before = float(model.module.weight.grad)
    model.finalize_backward()
    with together():
        assert before == RANK
        assert float(model.module.weight.grad) == pytest.approx(sum(range(SIZE)) / SIZE)

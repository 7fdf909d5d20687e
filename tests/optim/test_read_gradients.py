"""Programs that read and change `.grad`, beside the plain optimizer: they find means there.

These lie once for the ranks of a node; what a rank writes there stays its own.
"""

from collections.abc import Callable

import pytest
import torch
from models import loss_of
from optimizer_pairs import assert_same_parameters, pair, wide
from replicas import RANK, assert_same_bits, batch_of, share, together
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer

pytestmark = [pytest.mark.mpi, pytest.mark.sizes]


def batch(step: int) -> Tensor:
    torch.manual_seed(step)
    return share(batch_of(3, 30))


def backward(model: nn.Module, step: int) -> None:
    loss_of(model, batch(step)).backward()


def clip(model: DDP, optimizer: torch.optim.Optimizer) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clip_values(model: DDP, optimizer: torch.optim.Optimizer) -> Tensor:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    return torch.zeros(())


def log(model: DDP, optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])


def replace(model: DDP, optimizer: torch.optim.Optimizer) -> Tensor:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.sign() * 0.1
    return torch.zeros(())


def clip_and_log(model: DDP, optimizer: torch.optim.Optimizer) -> Tensor:
    """The special call, and then an ordinary one."""
    if isinstance(optimizer, NodeOptimizer):
        optimizer.clip_grad_norm_(0.05)
    else:
        clip(model, optimizer)
    return log(model, optimizer)


READERS = [clip, clip_values, log, replace, clip_and_log]


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_readers(reader: Callable[..., Tensor]) -> None:
    """The same numbers, the same parameters."""
    models = pair(wide, "momentum")
    for step in range(4):
        found = []
        for model, optimizer in models:
            optimizer.zero_grad()
            backward(model, step)
            found.append(reader(model, optimizer))
            optimizer.step()
        with together():
            torch.testing.assert_close(found[1], found[0])
    # What is clipped to a norm is rounded otherwise.
    assert_same_parameters(models[1][0], models[0][0], exact=reader in (log, replace))
    assert_same_bits(models[1][0].named_parameters())


def test_read_once_in_a_while() -> None:
    """As by a program that logs."""
    models = pair(wide, "momentum")
    for step in range(6):
        found = []
        for model, optimizer in models:
            (model, optimizer)[step % 2].zero_grad(set_to_none=step < 3)
            backward(model, step)
            if step in (2, 5):
                found.append(log(model, optimizer))
            optimizer.step()
        with together():
            torch.testing.assert_close(found[1:], found[:1])
    assert_same_parameters(models[1][0], models[0][0])


@pytest.mark.mpi(min_size=2)
def test_one_rank_reads() -> None:
    """The others need not come."""
    (plain, its), (model, optimizer) = pair(wide, "SGD")
    for step in range(2):
        its.zero_grad()
        optimizer.zero_grad()
        backward(plain, step)
        backward(model, step)
        truth = [p.grad for p in plain.parameters()]
        read = [p.grad for p in model.parameters()] if step == RANK else truth
        with together():
            assert all(map(torch.equal, read, truth))
        optimizer.step()
        its.step()
    assert_same_bits((str(n), p.grad) for n, p in enumerate(model.parameters()))


def test_read_after_the_step() -> None:
    """Until the next backward."""
    torch.manual_seed(0)
    model = DDP(wide(), shared_parameters=True)
    optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        with together():
            assert all(map(torch.equal, before, (p.grad for p in model.parameters())))
        assert_same_bits((str(n), p.grad) for n, p in enumerate(model.parameters()))


class Output:
    """What a forward of the user returns: nobody finds a tensor in it."""

    def __init__(self, value: Tensor) -> None:
        self._slots = (lambda: value,)

    def value(self) -> Tensor:
        return self._slots[0]()


class Wrapped(nn.Module):
    """Returns an object, or keeps its output to itself."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.inner = wide()
        self.keeps = keeps
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> object:
        y = self.inner(x)
        if self.keeps:
            self.kept = y
            return None
        return Output(y)


@pytest.mark.parametrize("keeps", [False, True])
def test_accumulation_of_what_nobody_finds(keeps: bool) -> None:
    """Gradients are completed before a second backward adds to them, whatever forward returns."""
    results = []
    for shared in (False, True):
        torch.manual_seed(0)
        model = DDP(Wrapped(keeps), shared_parameters=shared, find_unused_parameters=True)
        optimizer: torch.optim.Optimizer
        if shared:
            optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            for part in range(2):
                output = model(batch(10 * step + part).float())
                value = model.module.kept if keeps else output.value()
                value.square().mean().backward()
            optimizer.step()
        results.append(model)
    assert_same_parameters(results[1], results[0])


@pytest.mark.parametrize("rounds", [2, 3])
def test_replaced_between_accumulated_passes(rounds: int) -> None:
    models = pair(wide, "SGD")
    for step in range(2):
        for model, optimizer in models:
            optimizer.zero_grad()
            for part in range(rounds):
                backward(model, 10 * step + part)
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad = parameter.grad * 2
            optimizer.step()
    assert_same_parameters(models[1][0], models[0][0])


def penalise(model: nn.Module) -> None:
    torch.stack([p.square().sum() for p in model.parameters()]).sum().mul(0.01).backward()


def test_penalty_in_a_backward_of_its_own() -> None:
    """It is the same on all ranks, so it adds to means, and needs no reduction."""
    models = pair(wide, "SGD")
    for model, optimizer in models:
        optimizer.zero_grad()
        backward(model, 0)
        penalise(model.module)
        optimizer.step()
    assert_same_parameters(models[1][0], models[0][0])
    for model, optimizer in models:
        optimizer.zero_grad()
        backward(model, 1)
        penalise(model.module)
        clip(model, optimizer)
        optimizer.step()
    assert_same_parameters(models[1][0], models[0][0], exact=False)


def test_with_a_scaler() -> None:
    """Unscaled, clipped by torch and stepped."""
    models = pair(wide, "SGD")
    for model, optimizer in models:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch(step))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
    assert_same_parameters(models[1][0], models[0][0], exact=False)

"""Programs that read and change `.grad`, beside the plain optimizer: they find means there."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import loss_of
from optimizer_pairs import assert_same_parameters, pair, wide
from replicas import RANK, SIZE, assert_same_bits, batch_of, share, together
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.ddp import partial_means
from mpiddp.ddp.watched_gradients import gradient_of
from mpiddp.optim import NodeOptimizer

pytestmark = [pytest.mark.mpi, pytest.mark.sizes]

WARNING = "reads or changes .grad"


def batch(step: int) -> Tensor:
    torch.manual_seed(step)
    return share(batch_of(3, 30))


def warned() -> Any:
    """Expect the warning on the rank that gives it: there is nothing to write for one rank."""
    return pytest.warns(UserWarning, match=WARNING) if SIZE > 1 and RANK == 0 else quiet()


def quiet() -> Any:
    return contextlib.nullcontext()


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
@pytest.mark.parametrize("whole_steps", [0, 1, 3])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_readers(
    reader: Callable[..., Tensor], whole_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they come early or late: the same numbers, the same parameters."""
    monkeypatch.setattr(partial_means, "WHOLE_STEPS", whole_steps)
    models = pair(wide, "momentum")
    for step in range(4):
        found = []
        for model, optimizer in models:
            optimizer.zero_grad()
            backward(model, step)
            first = step == 0 and isinstance(optimizer, NodeOptimizer)
            with warned() if first else quiet():
                found.append(reader(model, optimizer))
            optimizer.step()
        with together():
            torch.testing.assert_close(found[1], found[0])
    # What is clipped to a norm is rounded otherwise.
    assert_same_parameters(models[1][0], models[0][0], exact=reader in (log, replace))
    assert_same_bits(models[1][0].named_parameters())


def test_first_reading_after_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a program that logs once in a while."""
    monkeypatch.setattr(partial_means, "WHOLE_STEPS", 2)
    models = pair(wide, "momentum")
    for step in range(8):
        found = []
        for model, optimizer in models:
            optimizer.zero_grad()
            backward(model, step)
            if step in (4, 7):
                first = step == 4 and isinstance(optimizer, NodeOptimizer)
                with warned() if first else quiet():
                    found.append(log(model, optimizer))
            optimizer.step()
        with together():
            torch.testing.assert_close(found[1:], found[:1])
    assert_same_parameters(models[1][0], models[0][0])


@pytest.mark.essential
def test_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then means go to their owners only, however gradients are dropped."""
    monkeypatch.setattr(partial_means, "WHOLE_STEPS", 2)
    torch.manual_seed(0)
    model = DDP(wide(), shared_parameters=True)
    optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(6):
        (model, optimizer)[step % 2].zero_grad(set_to_none=step < 4)
        backward(model, step)
        optimizer.step()
    with together():
        assert model._shared_parameters is not None
        assert model._shared_parameters.sends_to_owners == (SIZE > 1)


@pytest.mark.mpi(min_size=2)
def test_one_rank_reads_late() -> None:
    """The others need not come; all of them have whole means afterwards."""
    (plain, its), (model, optimizer) = pair(wide, "SGD")
    for step in range(2):
        its.zero_grad()
        optimizer.zero_grad()
        backward(plain, step)
        backward(model, step)
        truth = [p.grad for p in plain.parameters()]
        with warned() if step == 0 else quiet():
            read = [p.grad for p in model.parameters()] if RANK == 0 or step else truth
        with together():
            assert all(map(torch.equal, read, truth))
        optimizer.step()
        its.step()
    assert_same_bits((str(n), gradient_of(p)) for n, p in enumerate(model.parameters()))


@pytest.mark.mpi(min_size=2)
def test_read_after_the_step() -> None:
    """Too late for the first time, and right from then on."""
    torch.manual_seed(0)
    model = DDP(wide(), shared_parameters=True)
    optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        if step == 0:
            with together(), warned(), pytest.raises(RuntimeError, match="other parts are gone"):
                assert [p.grad for p in model.parameters()]
        if step == 2:  # the ranks have told each other in the second step
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
                first = step == part == 0 and isinstance(optimizer, NodeOptimizer)
                with warned() if first else quiet():
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
    model, optimizer = models[1]
    optimizer.zero_grad()
    backward(model, 1)
    penalise(model.module)
    if SIZE > 1:
        with together(), warned(), pytest.raises(RuntimeError, match="other parts are gone"):
            clip(model, optimizer)


@pytest.mark.mpi(min_size=2)
def test_one_rank_reads_while_others_add() -> None:
    """Nobody knows what it has read: no rank makes that step."""
    torch.manual_seed(0)
    model = DDP(wide(), shared_parameters=True)
    optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
    backward(model, 0)
    if RANK == 0:
        with warned():
            log(model, optimizer)
    penalise(model.module)
    before = [p.detach().clone() for p in model.parameters()]
    with together(), pytest.raises(RuntimeError, match="added to gradients in a backward"):
        optimizer.step()
    with together():
        assert all(map(torch.equal, model.parameters(), before))
    optimizer.zero_grad()
    backward(model, 1)
    assert_same_bits((str(n), gradient_of(p)) for n, p in enumerate(model.parameters()))
    optimizer.step()


@pytest.mark.parametrize("whole_steps", [0, 3])
def test_with_a_scaler(whole_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unscaled, clipped by torch and stepped."""
    monkeypatch.setattr(partial_means, "WHOLE_STEPS", whole_steps)
    models = pair(wide, "SGD")
    for model, optimizer in models:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch(step))).backward()
            scaler.unscale_(optimizer)
            first = step == 0 and isinstance(optimizer, NodeOptimizer)
            with warned() if first else quiet():
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
    assert_same_parameters(models[1][0], models[0][0], exact=False)

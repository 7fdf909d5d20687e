"""Ranks whose inputs have ended step their part as the others do: clipped, scaled or not."""

from typing import Any

import pytest
import torch
from models import loss_of, mlp
from replicas import RANK, SIZE, assert_same_bits, together
from torch import nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes]


def wide() -> nn.Module:
    """Return a model whose parameters belong to several ranks."""
    return mlp(30, 400, 300, 7, dtype=torch.float32)


def pair(lr: float = 0.05) -> tuple[tuple[DDP, torch.optim.SGD], tuple[DDP, NodeOptimizer]]:
    torch.manual_seed(1)
    plain = DDP(wide())
    torch.manual_seed(1)
    shared = DDP(wide(), shared_parameters=True)
    settings = {"lr": lr, "momentum": 0.9}
    return (
        (plain, torch.optim.SGD(plain.parameters(), **settings)),
        (shared, NodeOptimizer(shared, torch.optim.SGD, **settings)),
    )


def assert_alike(plain: DDP, shared: DDP) -> None:
    assert_same_bits(shared.named_parameters())
    with together():
        for own, truth in zip(shared.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, truth)


def test_settings_of_the_others() -> None:
    """Ranks that have no inputs left step their part with the settings of the others."""
    models = pair()
    for model, optimizer in models:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with model.join():
            for step in range(3 + 2 * RANK):
                torch.manual_seed(100 * step + RANK)
                optimizer.zero_grad()
                loss_of(model, torch.randn(3, 30)).backward()
                optimizer.step()
                scheduler.step()
    assert_alike(models[0][0], models[1][0])


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipped(norm_type: float) -> None:
    models = pair()
    for model, optimizer in models:
        with model.join():
            for step in range(2 + 2 * RANK):
                torch.manual_seed(100 * step + RANK)
                optimizer.zero_grad()
                loss_of(model, torch.randn(3, 30)).backward()
                if isinstance(optimizer, NodeOptimizer):
                    optimizer.gradient_norm()
                    norm = optimizer.clip_grad_norm_(1e-3, norm_type)
                else:
                    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type)
                assert norm > 1e-3
                optimizer.step()
    assert_alike(models[0][0], models[1][0])


def test_all_gradients() -> None:
    """Who asks for them in join() has the means as a whole."""
    (plain, _), (shared, optimizer) = pair()
    for model in (plain, shared):
        with model.join():
            for step in range(1 + RANK):
                torch.manual_seed(step + RANK)
                model.zero_grad()
                loss_of(model, torch.randn(3, 30)).backward()
                if model is shared:
                    optimizer.gradients()
                    optimizer.skip_step()
    if RANK == SIZE - 1:
        for own, truth in zip(shared.parameters(), plain.parameters(), strict=True):
            assert own.grad is not None
            assert truth.grad is not None
            torch.testing.assert_close(own.grad, truth.grad)
    assert_alike(plain, shared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaled_and_skipped(dtype: torch.dtype) -> None:
    """What only a rank without inputs sees to overflow skips the step of all."""
    models = pair(lr=0.01)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        train_with_a_scaler(models)
    finally:
        torch.set_default_dtype(default)


def train_with_a_scaler(models: Any) -> None:
    scales = []
    for model, optimizer in models:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        with model.join():
            for step in range(2 + 2 * RANK):
                torch.manual_seed(100 * step + RANK)
                optimizer.zero_grad()
                loss = loss_of(model, torch.randn(3, 30, dtype=torch.float32))
                if step == 2 and RANK == SIZE - 1:
                    # In the first layer, whose first elements belong to rank 0: it has no inputs.
                    model.module[0].weight.register_hook(overflow(step))
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                if isinstance(optimizer, NodeOptimizer):
                    optimizer.clip_grad_norm_(1e-2)
                else:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
                scaler.step(optimizer)
                scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    assert_alike(models[0][0], models[1][0])


def overflow(step: int):  # type: ignore[no-untyped-def]
    left = [1]

    def change(gradient: torch.Tensor) -> torch.Tensor:
        if left:
            left.pop()
            gradient = gradient.clone()
            gradient[0, 0] = float("inf")
        return gradient

    return change


def test_edits_before_it() -> None:
    """A rank that has no inputs at all has made them, too."""
    models = pair()
    for model, optimizer in models:
        loss_of(model, torch.ones(3, 30)).backward()
        optimizer.step()
        optimizer.param_groups[0]["params"].pop(2)
        optimizer.state.clear()
        with model.join():
            for step in range(2 * RANK):
                torch.manual_seed(100 * step + RANK)
                optimizer.zero_grad()
                loss_of(model, torch.randn(3, 30)).backward()
                optimizer.step()
    assert_alike(models[0][0], models[1][0])


def test_accumulated_without_zeroing() -> None:
    """A backward adds to means of the one before it, which ranks without inputs have, too."""
    models = pair()
    for model, optimizer in models:
        with model.join():
            for step in range(2 + 2 * RANK):
                torch.manual_seed(100 * step + RANK)
                if step % 3 == 0:
                    optimizer.zero_grad()
                loss_of(model, torch.randn(3, 30)).backward()
                optimizer.step()
    assert_alike(models[0][0], models[1][0])


def test_refused() -> None:
    """What ranks without inputs could not follow is an error, not a wait."""
    _, (shared, optimizer) = pair()
    batch = torch.randn(3, 30)
    with shared.join():
        optimizer.zero_grad()
        loss_of(shared, batch).backward()
        optimizer.step()
        with together(), pytest.raises(RuntimeError, match=r"writing\(\) changes"):
            shared.writing()
        # Nothing is wrong with what adds to means: other ranks may be without inputs.
        loss_of(shared, batch).backward()
        optimizer.step()

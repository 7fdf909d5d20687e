"""Ranks whose inputs have ended step their part as the others do: clipped, scaled or not."""

import copy
from typing import Any

import pytest
import torch
from models import loss_of, mlp
from replicas import RANK, SIZE, assert_same_bits, together
from torch import nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer, adopted

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


class TestOptimizersOfTheProgram:
    """What is made as for plain DDP is followed, also where a rank has no inputs at all."""

    @pytest.fixture(autouse=True, scope="class")
    @staticmethod
    def installed() -> None:
        adopted.install()

    def both(self) -> list[DDP]:
        models = []
        for shares in (False, True):
            torch.manual_seed(1)
            models.append(DDP(wide(), shared_parameters=shares))
        return models

    def backward(self, model: DDP, step: int) -> None:
        torch.manual_seed(100 * step + RANK)
        loss_of(model, torch.randn(3, 30)).backward()

    @pytest.mark.essential(keep=1)
    @pytest.mark.parametrize("of_first_rank", [0, 2])
    def test_state_of_a_checkpoint(self, of_first_rank: int) -> None:
        models = self.both()
        for model in models:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for step in range(2):
                optimizer.zero_grad()
                self.backward(model, step)
                optimizer.step()
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            optimizer.load_state_dict(saved)
            with model.join():
                for step in range(4 if RANK else of_first_rank):
                    optimizer.zero_grad()
                    self.backward(model, step)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                    optimizer.step()
        assert_alike(*models)

    @pytest.mark.parametrize("of_first_rank", [0, 2])
    def test_several_that_do_not_always_step(self, of_first_rank: int) -> None:
        models = self.both()
        for model in models:
            first, *others = model.parameters()
            every = torch.optim.AdamW([first], lr=0.01)
            second = torch.optim.SGD(others, lr=0.01, momentum=0.9)
            with model.join():
                for step in range(4 if RANK else of_first_rank):
                    model.zero_grad()
                    self.backward(model, step)
                    every.step()
                    if step % 2:
                        second.step()
        assert_alike(*models)

    @pytest.mark.parametrize("of_first_rank", [0, 2, 3])
    def test_accumulation(self, of_first_rank: int) -> None:
        """No line says that there is no step after a backward."""
        models = self.both()
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            with model.join():
                for step in range(5 if RANK else of_first_rank):
                    if step % 2 == 0:
                        optimizer.zero_grad()
                    self.backward(model, step)
                    if step % 2:
                        optimizer.step()
        assert_alike(*models)

    def test_one_that_is_left_alone(self) -> None:
        """An optimizer that some ranks still have, and others do not, is not followed."""
        models = self.both()
        for model in models:
            left = torch.optim.SGD(model.parameters(), lr=0.1) if RANK == 0 else None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with model.join():
                for step in range(2 * RANK):
                    optimizer.zero_grad()
                    self.backward(model, step)
                    optimizer.step()
            del left
        assert_alike(*models)

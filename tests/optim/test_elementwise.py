"""Optimizers that only seem to treat each element by itself are not taken for such."""

from typing import Any

import pytest
import torch

from mpiddp.optim.elementwise import ELEMENTWISE, find_state


class Factored(torch.optim.Optimizer):
    """As Adafactor: one number a row, for rows that are long enough."""

    def __init__(self, params: Any, least: int = 128) -> None:
        super().__init__(params, {"lr": 0.1, "least": least})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                squared = parameter.grad.square() + 1e-8
                if parameter.ndim == 2 and min(parameter.shape) >= group["least"]:
                    squared = squared.mean(1, keepdim=True)
                parameter -= group["lr"] * parameter.grad * squared.rsqrt()


class Clipping(torch.optim.SGD):
    """Clips the norm of the gradients that it is given."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1e3)
        return super().step(closure)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("optimizer_class", [Factored, Clipping])
def test_refused(optimizer_class: type[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="is not elementwise"):
        find_state(lambda tensors: optimizer_class(tensors), dtype, "it")  # type: ignore[call-arg]


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex128])
def test_taken(dtype: torch.dtype) -> None:
    for optimizer_class in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad):
        state = find_state(lambda t, c=optimizer_class: c(t, lr=1.0), dtype, "it")  # type: ignore[misc]
        assert all(kind.per_element or kind.shape == () for kind in state.values())


class Centralising(torch.optim.SGD):
    """Takes the mean of gradients away, of convolutions only (Yong et al., 2020)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() > 3:
                    parameter.grad -= parameter.grad.mean((1, 2, 3), keepdim=True)
        return super().step(closure)


class Projecting(torch.optim.SGD):
    """Steps orthogonally to parameters whose gradient nearly is (Heo et al., 2021)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, flat = parameter.grad, parameter.flatten()
                cosine = torch.cosine_similarity(gradient.flatten(), flat, dim=0).abs()
                if parameter.dim() > 1 and cosine < 0.1 / flat.numel() ** 0.5:
                    parameter.grad = gradient.sign() - (gradient.sign() * parameter).sum()
        return super().step(closure)


class Skipping(torch.optim.SGD):
    """Makes no step with a NaN."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            if all(parameter.grad.isfinite().all() for parameter in group["params"]):
                super().step(closure)


class Trusting(torch.optim.SGD):
    """Steps otherwise where all of the gradient is zero."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if not parameter.grad.any():
                    parameter -= parameter.mean()
        return super().step(closure)


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lr", [1e-4, 0.5])
@pytest.mark.parametrize("optimizer_class", [Centralising, Projecting, Skipping, Trusting])
def test_rarely_otherwise(
    optimizer_class: type[torch.optim.Optimizer], lr: float, dtype: torch.dtype
) -> None:
    """What they look at is not in every gradient, nor in every shape."""

    def make(tensors: Any) -> torch.optim.Optimizer:
        return optimizer_class(tensors, lr=lr)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="say elementwise=True"):
        find_state(make, dtype, "it")
    assert find_state(make, dtype, "it", known=True) == {}


@pytest.mark.parametrize("optimizer_class", sorted(ELEMENTWISE, key=str))
def test_known_ones_pass(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """The list is right: they would be taken without it."""
    for dtype in (torch.float32, torch.complex64):
        find_state(lambda t: optimizer_class(t, lr=1e-3), dtype, "it")  # type: ignore[call-arg]

"""Optimizers that only seem to treat each element by itself are refused."""

from typing import Any

import pytest
import torch

from mpiddp.optim.elementwise import find_state


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

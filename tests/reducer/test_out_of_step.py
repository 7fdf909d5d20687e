"""Ranks that leave a step out are an error on all ranks; right programs hear nothing."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import GivenGradients, loss_of, mlp
from replicas import RANK, SIZE, gather, mean_by_hook, together
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp import compression

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(60)]

LAST = SIZE - 1
SAID = "the ranks are out of step"


def error_of(run: Callable[[], object]) -> str:
    """Return what a call raises on this rank; the same on all ranks but for the rank's name."""
    with together(), pytest.raises(RuntimeError, match=rf"^rank {RANK}: {SAID}") as caught:
        run()
    nameless = str(caught.value).partition(": ")[2]
    with together():
        assert gather(nameless) == [nameless] * SIZE
    return nameless


def draw(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, dtype=dtype)


def leave_one_out(wrapped: DDP, x: Tensor) -> None:
    """Call forward without backward on the last rank, then take a step on all."""
    if RANK == LAST:
        loss_of(wrapped, x)
    loss_of(wrapped, x).backward()


def assert_told(said: str, lost: int, begun: int) -> None:
    with together():
        assert f"{lost} of {begun} on rank {LAST}; 0 of {begun - lost} on rank" in said


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64],
    ids=str,
)
def test_forward_without_backward(dtype, views):
    wrapped = DDP(mlp(3, 4, 2, dtype=dtype), gradient_as_bucket_view=views, bucket_cap_mb=1e-6)
    for _ in range(2):
        loss_of(wrapped, draw(dtype)).backward()
    assert_told(error_of(lambda: leave_one_out(wrapped, draw(dtype))), 1, 4)
    # All ranks have caught it and may go on: only what comes then counts.
    loss_of(wrapped, draw(dtype)).backward()
    said = error_of(lambda: leave_one_out(wrapped, draw(dtype)))
    with together():
        assert f"1 of 7 on rank {LAST}; 0 of 5 on rank" in said
    loss_of(wrapped, draw(dtype)).backward()


def test_a_parameter_of_one_element_with_a_stride(views):
    """The error compares all parameters; torch views this one as bytes only after a copy."""
    model = mlp(3, 4, 1)
    *_, last = (each for each in model.modules() if isinstance(each, nn.Linear))
    last.bias = nn.Parameter(torch.zeros(1, 2, dtype=torch.float64)[:, 0])
    wrapped = DDP(model, gradient_as_bucket_view=views)
    loss_of(wrapped, draw()).backward()
    assert_told(error_of(lambda: leave_one_out(wrapped, draw())), 1, 3)


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
def test_exception_of_forward_that_is_caught(first, views):
    wrapped = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views)
    if not first:
        loss_of(wrapped, draw()).backward()

    def step() -> None:
        if RANK == LAST:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                wrapped(torch.ones(2, 5, dtype=torch.float64))
        loss_of(wrapped, draw()).backward()

    assert_told(error_of(step), 1, 3 - first)


@pytest.mark.mpi(min_size=3)
def test_on_several_ranks(views):
    """What two ranks have lost does not cancel out what others have not."""
    wrapped = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views)

    def step() -> None:
        for _ in range(RANK):
            wrapped(draw())
        loss_of(wrapped, draw()).backward()

    said = error_of(step)
    counts = "; ".join(f"{rank} of {rank + 1} on rank {rank}" for rank in reversed(range(SIZE)))
    assert counts in said


HOW: dict[str, dict[str, Any]] = {
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "skipped buckets": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "messages": {"transport": "mpi"},
}


class _Idle(nn.Module):
    """A layer more than it uses."""

    def __init__(self) -> None:
        super().__init__()
        # First, so that its buckets are the last.
        self.idle = mlp(3, 3)
        self.body = mlp(3, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


@pytest.mark.parametrize("how", HOW)
def test_with_other_settings(how, views):
    model = mlp(3, 4, 2) if how == "messages" else _Idle()
    wrapped = DDP(model, gradient_as_bucket_view=views, bucket_cap_mb=1e-6, **HOW[how])
    for _ in range(2):
        loss_of(wrapped, draw()).backward()
    assert_told(error_of(lambda: leave_one_out(wrapped, draw())), 1, 4)


@pytest.mark.parametrize("hook", [mean_by_hook, compression.bf16, compression.fp16])
def test_with_communication_hooks(hook, views):
    wrapped = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views)
    wrapped.register_comm_hook(None, hook)
    loss_of(wrapped, draw()).backward()
    assert_told(error_of(lambda: leave_one_out(wrapped, draw())), 1, 3)


def test_with_sparse_gradients_only():
    wrapped = DDP(nn.Embedding(5, 2, sparse=True))
    tokens = torch.arange(4)
    wrapped(tokens).sum().backward()

    def step() -> None:
        if RANK == LAST:
            wrapped(tokens)
        wrapped(tokens).sum().backward()

    assert_told(error_of(step), 1, 3)


class TestWrong:
    """The ranks' parameters differ, so that gradients at different points were averaged."""

    def test_step_of_the_optimizer_alone(self, views):
        model = mlp(3, 4, 2)
        wrapped = DDP(model, gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(fails: bool = False) -> None:
            optimizer.zero_grad(set_to_none=False)
            if fails:
                with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                    wrapped(torch.ones(2, 5, dtype=torch.float64))
            else:
                loss_of(wrapped, draw()).backward()
            optimizer.step()

        for _ in range(2):
            step()
        if RANK == LAST:
            step(fails=True)
        said = rf"^rank {RANK}: {SAID}.*1 of 4 on rank {LAST}; 0 of 3 on rank.*"
        with together(), pytest.raises(RuntimeError, match=said) as caught:
            step()
        with together():
            assert f"parameters of rank {LAST} differ from those of rank 0" in str(caught.value)
        # All ranks have caught it, and may go on once they agree again.
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.data, src=0)
        step()


class TestRight:
    """Warnings are errors here: none of these has one."""

    @pytest.fixture
    def wrapped(self, views: bool) -> DDP:
        wrapped = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views)
        loss_of(wrapped, draw()).backward()
        return wrapped

    def test_several_forwards_for_one_backward(self, wrapped):
        for step in range(3):
            losses = [loss_of(wrapped, draw()) for _ in range(1 + (RANK + step) % 3)]
            torch.stack(losses).sum().backward()

    def test_parts_that_backward_comes_to_last(self):
        model = GivenGradients(a=torch.zeros(3), b=torch.zeros(3))
        wrapped = DDP(model, bucket_cap_mb=1e-6, find_unused_parameters=True)
        for _ in range(3):
            total = wrapped({"a": torch.ones(3)})
            if RANK == LAST:
                total = total + wrapped({"b": torch.ones(3)})
            total.backward()

    @pytest.mark.parametrize("how", ["no_grad", "eval", "module", "no_sync"])
    def test_forwards_that_nobody_waits_for(self, wrapped, how):
        for _ in range(2):
            if RANK == LAST:
                if how == "no_grad":
                    with torch.no_grad():
                        wrapped(draw())
                elif how == "eval":
                    wrapped.eval()
                    wrapped(draw())
                    wrapped.train()
                elif how == "module":
                    wrapped.module(draw())
                else:
                    with wrapped.no_sync():
                        loss_of(wrapped, draw()).backward()
            loss_of(wrapped, draw()).backward()

    def test_autograd_grad_on_one_rank(self, wrapped):
        for _ in range(2):
            if RANK == LAST:
                torch.autograd.grad(loss_of(wrapped, draw()), list(wrapped.parameters()))
            loss_of(wrapped, draw()).backward()

    def test_backward_twice(self, wrapped):
        for _ in range(2):
            loss = loss_of(wrapped, draw())
            loss.backward(retain_graph=True)
            if RANK == LAST:
                loss.backward()

    def test_left_out_on_all_ranks(self, wrapped):
        for _ in range(2):
            wrapped(draw())
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                wrapped(torch.ones(2, 5, dtype=torch.float64))
            loss_of(wrapped, draw()).backward()

    def test_outputs_without_a_graph(self, views):
        class Output(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(2))

            def forward(self, differentiable: bool) -> Tensor:
                return (self.weight if differentiable else self.weight.detach()).sum()

        wrapped = DDP(Output(), gradient_as_bucket_view=views)
        for _ in range(2):
            if RANK == LAST:
                wrapped(False)
            wrapped(True).backward()

    def test_join(self, wrapped):
        """Those that have joined stay behind."""
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with wrapped.join():
            for _ in range(4 * RANK):
                optimizer.zero_grad()
                loss_of(wrapped, draw()).backward()
                optimizer.step()
        loss_of(wrapped, draw()).backward()

    def test_join_with_sparse_gradients(self):
        wrapped = DDP(nn.Embedding(5, 2, sparse=True))
        with wrapped.join():
            for _ in range(RANK):
                wrapped(torch.arange(4)).sum().backward()
        wrapped(torch.arange(4)).sum().backward()


class TestHigherOrders:
    def test_warning_once(self, views, monkeypatch):
        from mpiddp.reducer import forward_passes

        monkeypatch.setattr(forward_passes, "_warned_of_higher_orders", False, raising=False)
        model = mlp(3, 4, 2)
        wrapped = DDP(model, gradient_as_bucket_view=views)
        said = []
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss_of(wrapped, draw()).backward(create_graph=True)
            said += [w for w in caught if re.match("Using DistributedDataParallel", str(w.message))]
            wrapped.zero_grad()
        with together():
            (warning,) = said
            assert warning.category is UserWarning
            assert "create_graph=True is not well-supported" in str(warning.message)
            assert "not averaged" in str(warning.message)

    def test_no_warning_of_a_gradient_penalty(self, views, monkeypatch):
        from mpiddp.reducer import forward_passes

        monkeypatch.setattr(forward_passes, "_warned_of_higher_orders", False, raising=False)
        wrapped = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views)
        x = draw().requires_grad_()
        output = wrapped(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.sum() + slope.square().sum()).backward()

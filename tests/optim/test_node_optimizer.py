"""One optimizer step a node, beside torch's plain optimizers and torch's wrapper over Gloo."""

import contextlib
import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from models import CASES, Case, Given, loss_of, mlp
from optimizer_pairs import OPTIMIZERS, assert_same_parameters, assert_same_state, pair, train, wide
from pretended_nodes import NODES, group_on
from replicas import (
    RANK,
    SIZE,
    assert_close,
    assert_same_bits,
    batch_of,
    drawn_together,
    gather,
    share,
    together,
)
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer

pytestmark = [pytest.mark.mpi, pytest.mark.sizes]


@pytest.mark.essential(keep=5)
@pytest.mark.smoke(keep=1)
@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_as_the_plain_optimizer(name: str) -> None:
    """Bit for bit: each element sees the same operations. Fused ones have other vector tails."""
    models = pair(wide, name)
    train(models, 8)
    assert_same_parameters(models[1][0], models[0][0], exact="fused" not in name)
    assert_same_bits(models[1][0].named_parameters())
    assert_same_state(models[1][1], models[0][1])


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", ["momentum", "AdamW", "AdamW fused"])
def test_after_200_steps(name: str, gloo: dist.ProcessGroup) -> None:
    """Beside torch's own class over Gloo. Three ranks and more it adds in another order."""
    models = pair(lambda: mlp(6, 200, 3, dtype=torch.float32), name)
    torch.manual_seed(1)
    torchs = nn.parallel.DistributedDataParallel(
        mlp(6, 200, 3, dtype=torch.float32), process_group=gloo
    )
    optimizer_class, settings = OPTIMIZERS[name]
    optimizer = optimizer_class(torchs.parameters(), **settings)
    train([*models, (torchs, optimizer)], 200, width=6)
    exact = "fused" not in name
    assert_same_parameters(models[1][0], models[0][0], exact=exact)
    assert_same_bits(models[1][0].named_parameters())
    if SIZE <= 2:
        assert_same_parameters(models[1][0], torchs, exact=exact)


@pytest.mark.essential
def test_fused_updates() -> None:
    """From the same state, each update is the same to two units in its last place."""
    (plain, optimizer), (model, own) = pair(
        lambda: mlp(6, 200, 3, dtype=torch.float32), "AdamW fused"
    )
    for step in range(50):
        before = [parameter.detach().clone() for parameter in plain.parameters()]
        train([(plain, optimizer), (model, own)], 1, width=6)
        with together():
            for start, here, there in zip(
                before, model.parameters(), plain.parameters(), strict=True
            ):
                update = (there - start).abs()
                # An update is rounded to its parameter's last place when it is added.
                unit = torch.finfo(torch.float32).eps * torch.maximum(update, there.abs())
                assert bool(((here - there).abs() <= 2 * unit).all()), step
        with model.writing():
            model.module.load_state_dict(plain.module.state_dict())
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_late_ranks() -> None:
    """Nobody reads what is not written, nor writes what is still read."""

    class Late(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.steps += 1
            if self.steps % SIZE == RANK:
                time.sleep(0.03)
            super().step()

    torch.manual_seed(1)
    plain = DDP(wide())
    torch.manual_seed(1)
    model = DDP(wide(), shared_parameters=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    own = NodeOptimizer(model, Late, elementwise=True, lr=0.1)
    for step in range(8):
        torch.manual_seed(step)
        batch = share(batch_of(3, 30))
        optimizer.zero_grad()
        own.zero_grad()
        before = loss_of(plain, batch)
        after = loss_of(model, batch)
        with together():
            assert torch.equal(after, before)
        before.backward()
        after.backward()
        if (step + 1) % SIZE == RANK:
            time.sleep(0.03)
        again = loss_of(model.module, batch).item()
        own.step()
        with torch.no_grad():
            stepped = loss_of(model.module, batch)  # at once, while a rank still steps
            optimizer.step()
            expected = loss_of(plain.module, batch)
        with together():
            assert again == before.item()
            assert torch.equal(stepped, expected)


@pytest.mark.essential(keep=2)
@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_models(case: Case) -> None:
    """Tied parameters, odd layouts, several dtypes, complex ones."""
    name = "momentum" if case.make is CASES["mixed dtypes"].make else "AdamW"
    models = pair(case.make, name)
    for step in range(4):
        torch.manual_seed(step)
        batch = share(case.batch(2 * SIZE))
        for model, optimizer in models:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    # A slice becomes dense when it is shared, and then torch rounds products otherwise. It rounds
    # vectors of 16-bit elements otherwise than what is left over.
    exact = case not in (CASES["odd layouts"], CASES["mixed dtypes"])
    assert_same_parameters(models[1][0], models[0][0], exact, case.rounding)


def test_refused() -> None:
    plain = DDP(nn.Linear(2, 2))
    shared = DDP(nn.Linear(2, 2), shared_parameters=True)
    with together():
        with pytest.raises(ValueError, match="shared_parameters=True"):
            NodeOptimizer(plain, torch.optim.SGD, lr=1)
        with pytest.raises(ValueError, match="not one that the model"):
            NodeOptimizer(shared, torch.optim.SGD, [torch.zeros(3)], lr=1)
        with pytest.raises(ValueError, match="differentiable"):
            NodeOptimizer(shared, torch.optim.SGD, lr=1, differentiable=True)


# A batch of steps as hypothesis draws it: what happens before each step of the optimizer.
ACTIONS = st.lists(
    st.sampled_from(["step", "accumulate", "no_sync", "clip", "zeros", "keep", "late zero"]),
    min_size=3,
    max_size=6,
)


@pytest.mark.thorough
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    groups=st.booleans(),
    place=st.sampled_from([None, *NODES.values()]),
    actions=ACTIONS,
)
@example(  # on nodes with other numbers of ranks, in 16 bits: the same bits all the same
    name="Adam",
    dtype=torch.bfloat16,
    groups=True,
    place=[0, 1, 1, 1],
    actions=["keep", "accumulate", "accumulate", "late zero", "zeros"],
)
@drawn_together(25)
def test_sweep(
    name: str,
    dtype: torch.dtype,
    groups: bool,
    place: list[int] | None,
    actions: list[str],
) -> None:
    """Beside torch's optimizer in one process, on the gradients of the whole batch."""
    with contextlib.ExitStack() as stack:
        group = None
        if place is not None:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            group = stack.enter_context(group_on(place, patch))
        sweep(name, dtype, groups, group, actions)


def sweep(
    name: str,
    dtype: torch.dtype,
    groups: bool,
    group: dist.ProcessGroup | None,
    actions: list[str],
) -> None:
    torch.manual_seed(2)
    bare = mlp(5, 300, 200, 3, dtype=dtype)
    torch.manual_seed(2)
    made = mlp(5, 300, 200, 3, dtype=dtype)
    model = DDP(made, process_group=group, shared_parameters=True)
    optimizer_class, settings = OPTIMIZERS[name]

    def grouped(module: nn.Module) -> Any:
        parameters = list(module.parameters())
        if not groups:
            return parameters
        return [{"params": parameters[::2], "lr": 0.02}, {"params": parameters[1::2]}]

    plain = optimizer_class(grouped(bare), **settings)
    own = NodeOptimizer(model, optimizer_class, grouped(model), **settings)
    for number, action in enumerate(actions):
        torch.manual_seed(number)
        if action != "keep":
            for optimizer in (plain, own):
                optimizer.zero_grad(set_to_none=action != "zeros")
        batches = [batch_of(2, 5, dtype=dtype) for _ in range(2 if action != "step" else 1)]
        for n, batch in enumerate(batches):
            _backward_of_all(bare, batch)
            if action == "no_sync" and n == 0:
                with model.no_sync():
                    loss_of(model, share(batch)).backward()
            elif action == "late zero" and n == 0:
                loss = loss_of(model, share(batch))
                plain.zero_grad()
                own.zero_grad()
                _backward_of_all(bare, batch)
                loss.backward()
            else:
                loss_of(model, share(batch)).backward()
        if action == "clip":
            truth = nn.utils.clip_grad_norm_(bare.parameters(), 0.05)
            norm = own.clip_grad_norm_(0.05)
            with together():
                assert_close(norm.to(truth.dtype), truth, "norm", factor=4)
        plain.step()
        own.step()
    # Signs of what rounding leaves decide in Rprop and its like, and in RMSprop's first steps;
    # bfloat16 rounds in other places.
    by_sign = name in ("Rprop", "the user's") or (name, dtype) == ("RMSprop", torch.float32)
    if not by_sign and dtype is not torch.bfloat16:
        with together():
            for (label, p), q in zip(model.named_parameters(), bare.parameters(), strict=True):
                assert_close(p, q, label, rounding=2e-3)
    assert_same_bits(model.named_parameters())


def _backward_of_all(module: nn.Module, batch: Tensor) -> None:
    """Add the mean over ranks of their gradients to those of a bare module."""
    parameters = list(module.parameters())
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for rank in range(SIZE):
        gradients = torch.autograd.grad(loss_of(module, share(batch, rank)), parameters)
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient.double()
    for parameter, total in zip(parameters, sums, strict=True):
        mean = (total / SIZE).to(parameter.dtype)
        parameter.grad = mean if parameter.grad is None else parameter.grad + mean


def test_gradients_and_norms() -> None:
    (plain, _), (model, own) = pair(wide, "SGD")
    batch = share(batch_of(3, 30))
    for module in (plain, model):
        loss_of(module, batch).backward()
    truth = [p.grad for p in plain.parameters()]
    for kind in (1.0, 2.0, 3.0, float("inf")):
        # torch's own norm of float32 is less exact.
        expected = nn.utils.get_total_norm([g.double() for g in truth if g is not None], kind)
        norm = own.gradient_norm(kind)
        assert_same_bits([("norm", norm)])
        with together():
            assert_close(norm, expected.float(), f"norm {kind}", factor=4)
    found = own.gradients()
    with together():
        assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
        assert all(a is p.grad for a, p in zip(found, model.parameters(), strict=True))
        with pytest.raises(ValueError, match="norm_type"):
            own.gradient_norm(0)


def test_replaced_gradients_are_clipped() -> None:
    """What is clipped is what is stepped, also where the user has made new gradients."""
    models = pair(wide, "SGD")
    for model, optimizer in models:
        torch.manual_seed(RANK)
        optimizer.zero_grad()
        loss_of(model, torch.randn(3, 30)).backward()
        if isinstance(optimizer, NodeOptimizer):
            optimizer.gradients()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 100
        if isinstance(optimizer, NodeOptimizer):
            optimizer.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert_same_parameters(models[1][0], models[0][0], exact=False)


def test_gradients_that_are_not_finite() -> None:
    """One element overflows where only one rank sees it: all skip the step, and scale alike."""
    model = DDP(Given(200_000, torch.float32), shared_parameters=True)
    own = NodeOptimizer(model, torch.optim.SGD, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    scales = []
    for step in range(4):
        own.zero_grad()
        gradient = torch.full((200_000,), 0.5)
        if step == 1 and RANK == SIZE - 1:
            gradient[150_000] = float("inf")  # in its own part
        output = model()
        scaler.scale((output * gradient).sum()).backward()
        if step == 2:
            scaler.unscale_(own)
            own.clip_grad_norm_(1e9)
        scaler.step(own)
        scaler.update()
        scales.append(scaler.get_scale())
        with together():
            expected = -0.5 * (step + 1 if step < 1 else step)
            assert torch.equal(next(model.parameters()), torch.full((200_000,), expected))
    assert gather(scales) == [[4.0, 2.0, 2.0, 4.0]] * SIZE
    own.zero_grad()
    model().backward(torch.full((200_000,), float("nan")))
    with together(), pytest.raises(RuntimeError, match="norm"):
        own.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.essential
def test_training_goes_on() -> None:
    """Schedulers, hooks, closures, groups that come later, frozen and unused parameters."""
    torch.manual_seed(0)
    models = []
    calls = []
    for shared in (False, True):
        torch.manual_seed(3)
        module = nn.ModuleDict(
            {"a": nn.Linear(30, 200), "b": nn.Linear(200, 9), "late": nn.Linear(30, 9)}
        )
        module["frozen"] = nn.Linear(9, 9).requires_grad_(False)
        module["unused"] = nn.Linear(100, 400)

        def forward(x: Tensor, late: bool, module: nn.ModuleDict = module) -> Tensor:
            y: Tensor = module["frozen"](module["b"](module["a"](x).tanh()))
            return y + module["late"](x) if late else y

        module.forward = forward  # type: ignore[method-assign]
        model = DDP(module, shared_parameters=shared, find_unused_parameters=True)
        given_first = [*module["a"].parameters(), *module["late"].parameters()]
        settings = {"lr": 0.01, "weight_decay": 0.1}
        optimizer: torch.optim.Optimizer
        if shared:
            optimizer = NodeOptimizer(model, torch.optim.AdamW, given_first, **settings)
        else:
            optimizer = torch.optim.AdamW(given_first, **settings)
        optimizer.add_param_group({"params": list(module["b"].parameters()), "lr": 0.1})
        optimizer.add_param_group({"params": list(module["unused"].parameters())})
        optimizer.register_step_post_hook(lambda *_, shared=shared: calls.append(shared))
        models.append((model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)))
    for step in range(4):
        batch = share(batch_of(2, 30))
        losses = []
        for model, optimizer, scheduler in models:

            def closure(
                model: DDP = model,
                optimizer: Any = optimizer,
                batch: Tensor = batch,
                late: bool = step >= 2,
            ) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(batch, late).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
            scheduler.step()
        with together():
            assert torch.equal(losses[0], losses[1])
    assert_same_parameters(models[1][0], models[0][0])
    with together():
        assert calls == [False, True] * 4
        states = [optimizer.state_dict() for _, optimizer, _ in models]
        assert states[0]["state"].keys() == states[1]["state"].keys()
        assert states[0]["param_groups"] == states[1]["param_groups"]

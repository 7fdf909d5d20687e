"""Optimizers that look at whole parameters, beside the plain ones on the gradients of all ranks."""

import copy
from typing import Any

import pytest
import torch
from models import loss_of, mlp
from optimizer_pairs import assert_same_parameters, assert_same_state, train
from pretended_nodes import NODES, group_on
from random_programs import chain
from replicas import RANK, SIZE, assert_close, assert_same_bits, batch_of, share, together
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer

pytestmark = [pytest.mark.mpi, pytest.mark.sizes]


class Centralising(torch.optim.SGD):
    """Takes the mean of gradients away, and leaves another tensor in `.grad`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.dim() > 1:
                    parameter.grad = parameter.grad - parameter.grad.mean(0, keepdim=True)
        return super().step(closure)


class Clamping(torch.optim.SGD):
    """Elementwise, and leaves another tensor in `.grad`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clamp(-0.01, 0.01)
        return super().step(closure)


class Rows(torch.optim.Optimizer):
    """Keeps a number for each row, numbers of Python and None."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                first = (
                    parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[:, None]
                )
                squares = first.square().sum(1)
                if not state:
                    state.update(steps=0, rows=torch.zeros_like(squares), nothing=None)
                state["steps"] += 1
                state["rows"] = state["rows"] + squares  # a new tensor each time
                scale = (state["rows"].sqrt() + 1e-3).view(-1, *[1] * (parameter.dim() - 1))
                parameter -= group["lr"] / state["steps"] * parameter.grad / scale


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "Muon": (torch.optim.Muon, {"lr": 0.05}),
    "Centralising": (Centralising, {"lr": 0.05, "momentum": 0.9}),
    "Clamping": (Clamping, {"lr": 0.05}),
    "Rows": (Rows, {}),
    "SGD, whole": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "elementwise": False}),
}


def made(name: str, wide: int = 30, group: Any = None) -> list[tuple[Any, Any]]:
    """Return a model with the plain optimizer, and one with shared parameters and ours."""
    optimizer_class, settings = OPTIMIZERS[name]
    pairs: list[tuple[Any, Any]] = []
    for shared in (False, True):
        torch.manual_seed(3)
        layers = mlp(3, wide, 3, dtype=torch.float32)
        if name == "Muon":  # takes matrices only
            layers = nn.Sequential(
                nn.Linear(3, wide, bias=False), nn.Tanh(), nn.Linear(wide, 3, bias=False)
            )
        model = DDP(layers, process_group=group, shared_parameters=shared)
        if shared:
            pairs.append((model, NodeOptimizer(model, optimizer_class, **settings)))
        else:
            plain = {key: value for key, value in settings.items() if key != "elementwise"}
            pairs.append((model, optimizer_class(model.parameters(), **plain)))
    return pairs


@pytest.mark.essential(keep=3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_as_the_plain_optimizer(name: str) -> None:
    """Bit for bit, and so is the state."""
    models = made(name)
    train(models, 5, width=3)
    assert_same_parameters(models[1][0], models[0][0], exact=True)
    assert_same_bits(models[1][0].named_parameters())
    assert_same_state(models[1][1], models[0][1], nones=False)


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES.keys())
def test_on_nodes(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node deals the parameters to its own ranks."""
    with group_on(nodes, monkeypatch) as group:
        models = made("Adafactor", group=group)
        train(models, 4, width=3)
        assert_same_parameters(models[1][0], models[0][0])
        assert_same_bits(models[1][0].named_parameters())


def of_several_dtypes(group: Any, shared: bool) -> "tuple[DDP, list[Any]]":
    """Return a model, and a group of parameters for each of its dtypes."""
    torch.manual_seed(3)
    layers = chain((3, 30, 20, 3), (torch.float32, torch.float64, torch.bfloat16))
    model = DDP(layers, process_group=group, shared_parameters=shared)
    return model, [{"params": list(layers[place].parameters())} for place in (0, 2, 4)]


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES.keys())
def test_several_dtypes(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adafactor takes a setting from a group's first dtype, whichever a rank steps first."""
    with group_on(nodes, monkeypatch) as group:
        plain, groups = of_several_dtypes(group, shared=False)
        model, own = of_several_dtypes(group, shared=True)
        with together(), pytest.raises(TypeError, match="each dtype a group of their own"):
            NodeOptimizer(model, torch.optim.Adafactor, lr=0.05)
        models = [
            (plain, torch.optim.Adafactor(groups, lr=0.05)),
            (model, NodeOptimizer(model, torch.optim.Adafactor, own, lr=0.05)),
        ]
        train(models, 4, width=3)
        assert_same_parameters(model, plain)
        assert_same_bits(model.named_parameters())


def test_other_optimizers_of_several_dtypes() -> None:
    """What looks at no other parameter takes all in one group, known to us or not."""
    for optimizer_class in (torch.optim.AdamW, Clamping):
        model, _ = of_several_dtypes(None, shared=True)
        NodeOptimizer(model, optimizer_class, lr=0.05)


@pytest.mark.parametrize("name", ["Adafactor", "Rows"])
def test_checkpoints_of_either(name: str) -> None:
    """Ours is the plain optimizer's, in both directions."""
    models = made(name)
    train(models, 3, width=3)
    saved = [
        (copy.deepcopy(model.module.state_dict()), copy.deepcopy(optimizer.state_dict()))
        for model, optimizer in models
    ]
    train(models, 2, width=3)
    for (model, optimizer), (weights, state) in zip(models, reversed(saved), strict=True):
        model.module.load_state_dict(weights)
        optimizer.load_state_dict(state)
    train(models, 3, width=3)
    assert_same_parameters(models[1][0], models[0][0])
    wrong = copy.deepcopy(saved[0][1])
    key, tensor = next(
        (k, v) for k, v in wrong["state"][0].items() if isinstance(v, Tensor) and v.dim()
    )
    wrong["state"][0][key] = tensor.new_zeros(7, 7)
    with together(), pytest.raises(RuntimeError, match="of shape"):
        models[1][1].load_state_dict(wrong)


def test_edited_state() -> None:
    models = made("Rows")
    for _ in range(2):
        train(models, 2, width=3)
        for model, optimizer in models:
            first = next(iter(model.parameters()))
            optimizer.state[first]["rows"] = optimizer.state[first]["rows"] * 0.5
            optimizer.state[first]["steps"] = 1
    train(models, 2, width=3)
    assert_same_parameters(models[1][0], models[0][0])


def test_clipped_and_accumulated() -> None:
    models = made("Adafactor")
    for step in range(4):
        norms = []
        for model, optimizer in models:
            torch.manual_seed(step)
            with model.no_sync():
                loss_of(model, share(batch_of(2, 3))).backward()
            loss_of(model, share(batch_of(2, 3))).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
        with together():
            assert torch.equal(*norms)
    assert_same_parameters(models[1][0], models[0][0])


def test_own_clip() -> None:
    """Parameters that have a gradient only, scaled on all ranks."""
    models = made("Rows")
    for step in range(3):
        for model, optimizer in models:
            torch.manual_seed(step)
            loss_of(model, share(batch_of(2, 3))).backward()
            if isinstance(optimizer, NodeOptimizer):
                optimizer.clip_grad_norm_(0.1)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(models[1][0], models[0][0], exact=False, rounding=1e-5)


def test_ranks_without_inputs() -> None:
    """They step what they own with the means of the others."""
    models = made("Adafactor")
    for model, optimizer in models:
        with model.join():
            for step in range(2 + RANK):
                torch.manual_seed(10 * step + RANK)
                optimizer.zero_grad()
                loss_of(model, batch_of(4, 3)).backward()
                optimizer.step()
    assert_same_bits(models[1][0].named_parameters())
    if RANK == SIZE - 1:  # the plain optimizer of a rank without inputs does not step
        for own, plain in zip(models[1][0].parameters(), models[0][0].parameters(), strict=True):
            assert_close(own.detach(), plain.detach(), "parameter")


def test_group_that_is_added() -> None:
    """Of an optimizer whose other groups are elementwise: all have whole means from then on."""

    class Sometimes(torch.optim.SGD):
        """Takes the mean away in some groups."""

        def __init__(self, params: Any, lr: float, central: bool = False) -> None:
            super().__init__(params, lr=lr)
            self.defaults["central"] = central
            for group in self.param_groups:
                group.setdefault("central", central)

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    if group.get("central") and parameter.grad is not None:
                        parameter.grad -= parameter.grad.mean()
            return super().step(closure)

    pairs: list[tuple[Any, Any]] = []
    for shared in (False, True):
        torch.manual_seed(3)
        model = DDP(mlp(3, 30, 3, dtype=torch.float32), shared_parameters=shared)
        first, *rest = model.parameters()
        maker: Any = NodeOptimizer if shared else lambda _, c, params, **kw: c(params, **kw)
        optimizer = maker(model, Sometimes, [{"params": [first]}], lr=0.1)
        optimizer.add_param_group({"params": rest, "central": True, "lr": 0.2})
        pairs.append((model, optimizer))
    train(pairs, 4, width=3)
    assert_same_parameters(pairs[1][0], pairs[0][0])


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("how", ["LBFGS", "SparseAdam", "skips", "norm"])
def test_several_at_once(how: str) -> None:
    """What looks at several parameters cannot be dealt."""

    class Looking(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            given = [each.grad for group in self.param_groups for each in group["params"]]
            if how == "norm":
                torch.nn.utils.clip_grads_with_norm_(
                    [each for group in self.param_groups for each in group["params"]],
                    0.1,
                    torch.nn.utils.get_total_norm(given),
                )
            elif not all(bool(gradient.isfinite().all()) for gradient in given):
                return None
            return super().step(closure)

    kinds = {"LBFGS": torch.optim.LBFGS, "SparseAdam": torch.optim.SparseAdam}
    optimizer_class = kinds.get(how, Looking)
    model = DDP(nn.Linear(3, 3), shared_parameters=True)
    with together(), pytest.raises(TypeError, match=optimizer_class.__name__):
        NodeOptimizer(model, optimizer_class, lr=0.1)

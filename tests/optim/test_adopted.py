"""The program's own optimizers step shared parameters in parts, with the bits of plain ones."""

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from models import loss_of, mlp
from replicas import RANK, SIZE, assert_same_bits, batch_of, share, together
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import adopted

pytestmark = [pytest.mark.mpi, pytest.mark.sizes]

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Counting(torch.optim.Optimizer):
    """Of a user: it has attributes, and keeps a number of Python for each parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["times"] = state.get("times", 0) + 1
                    state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(group["lr"] * state["sum"] / state["times"])
        return loss


class Decaying(torch.optim.SGD):
    """Of a user: its step calls that of torch's class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
        return super().step(closure)


MAKERS: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
    "a user's": lambda params: Counting(params, lr=0.1),
    "of a subclass": lambda params: Decaying(params, lr=0.1, momentum=0.9),
}


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    adopted.install()


def module(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return mlp(6, 200, 200, 3, dtype=torch.float32)


def both(make: Make, before: bool = False, **options: Any) -> list[tuple[DDP, Any]]:
    """Return a plain model and one that is shared, each with an optimizer."""
    made: list[tuple[DDP, Any]] = []
    for shared in (False, True):
        bare = module()
        optimizer = make(bare.parameters()) if before else None
        model = DDP(bare, shared_parameters=shared, **options)
        made.append((model, optimizer or make(model.parameters())))
    return made


def train(models: list[tuple[DDP, Any]], seeds: Iterable[int] = range(3)) -> None:
    for model, optimizer in models:
        for seed in seeds:
            torch.manual_seed(seed)
            optimizer.zero_grad()
            loss_of(model, share(batch_of(2, 6))).backward()
            optimizer.step()


def assert_alike(models: list[tuple[DDP, Any]]) -> None:
    (plain, of_plain), (model, optimizer) = models
    with together():
        for ours, truth in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, truth)
        ours, truth = optimizer.state_dict(), of_plain.state_dict()
        assert ours["param_groups"] == truth["param_groups"]
        assert ours["state"].keys() == truth["state"].keys()
        for number, state in truth["state"].items():
            assert ours["state"][number].keys() == state.keys()
            for key, value in state.items():
                own = ours["state"][number][key]
                assert torch.equal(own, value) if isinstance(value, Tensor) else own == value
        parts = adopted._adopted[optimizer]._parts
        assert parts, "it was not adopted"
    assert_same_bits(model.named_parameters())


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("before", [False, True], ids=["after wrapping", "before"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_as_plain(make: Make, before: bool) -> None:
    models = both(make, before)
    train(models)
    assert_alike(models)
    model, optimizer = models[1]
    with together():
        assert type(optimizer) is type(models[0][1])
        given = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(map(lambda a, b: a is b, given, model.parameters()))
        if isinstance(optimizer, Counting):
            assert optimizer.steps == 3


def test_made_and_stepped_before_the_module_is_wrapped() -> None:
    made = []
    for shared in (False, True):
        bare = module()
        optimizer = torch.optim.AdamW(bare.parameters(), lr=0.01)
        for seed in range(2):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            bare(torch.randn(2, 6)).square().sum().backward()
            optimizer.step()
        made.append((DDP(bare, shared_parameters=shared), optimizer))
    train(made)
    assert_alike(made)


def test_parameters_put_into_groups_later() -> None:
    """Not by add_param_group, as plain torch allows; and moved between groups."""
    models = both(
        lambda params: torch.optim.AdamW([{"params": [each]} for each in list(params)[:3]], lr=0.01)
    )
    train(models)
    for model, optimizer in models:
        *_, last = model.parameters()
        optimizer.param_groups[0]["params"].append(last)
        optimizer.state[next(model.parameters())]["exp_avg"].mul_(0.5)
    train(models)
    for _, optimizer in models:
        first, second, *_ = optimizer.param_groups
        first["params"], second["params"] = second["params"], first["params"]
    train(models)
    assert_alike(models)


def test_groups_schedulers_hooks_and_closures() -> None:
    """Also a group that is added later, frozen layers, and a closure's loss."""
    models = both(
        lambda params: torch.optim.SGD(list(params)[:2], lr=0.1, momentum=0.5),
        before=True,
        find_unused_parameters=True,
    )
    seen: list[list[Any]] = [[], []]
    losses: list[list[float]] = [[], []]
    for number, (model, optimizer) in enumerate(models):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        own = list(model.parameters())

        def note(opt: Any, *_: Any, own: list[Any] = own, number: int = number) -> None:
            given = [p for group in opt.param_groups for p in group["params"]]
            seen[number].append([given[0] is own[0], own[0].detach().sum().item(), len(opt.state)])

        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(note)
        for seed in range(6):
            torch.manual_seed(seed)
            if seed == 2:
                optimizer.add_param_group({"params": own[2:], "lr": 0.05})
                # A scheduler knows the groups that there were.
                scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            own[0].requires_grad_(seed != 4)

            def closure(model: DDP = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, share(batch_of(2, 6)))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                return loss

            losses[number].append(optimizer.step(closure).item())
            scheduler.step()
    assert_alike(models)
    with together():
        assert losses[0] == losses[1]
        assert seen[0] == seen[1]
        assert all(first for first, *_ in seen[1])


def test_parameters_of_several_modules() -> None:
    """Two wrapped ones, and one of which each rank has its own; then an optimizer for each."""
    made: list[tuple[list[nn.Module], Any]] = []
    for shared in (False, True):
        first, second = (DDP(module(seed), shared_parameters=shared) for seed in (0, 1))
        torch.manual_seed(2)
        alone = nn.Linear(6, 6)
        parameters = [p for each in (first, alone, second) for p in each.parameters()]
        optimizer = torch.optim.Adam([{"params": parameters[:6]}, {"params": parameters[6:]}])
        others = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
        made.append(([first, second, alone], [optimizer, *others]))
    for (first, second, alone), optimizers in made:
        for step in range(6):
            torch.manual_seed(step)
            batch = share(batch_of(2, 6))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = (first(alone(batch)) + second(batch)).square().sum()
            loss.backward()
            with torch.no_grad():
                for p in alone.parameters():
                    torch.distributed.all_reduce(p.grad)
            for optimizer in optimizers[:1] if step < 3 else optimizers[1:]:
                optimizer.step()
    with together():
        for ours, truth in zip(made[1][0], made[0][0], strict=True):
            assert all(map(torch.equal, ours.parameters(), truth.parameters()))
        states = [optimizers[0].state_dict()["state"] for _, optimizers in made]
        assert states[0].keys() == states[1].keys()
        for number, state in states[0].items():
            assert all(torch.equal(states[1][number][key], value) for key, value in state.items())


@pytest.mark.parametrize("make", [MAKERS["AdamW"], MAKERS["a user's"]], ids=["AdamW", "user's"])
def test_checkpoints(make: Make) -> None:
    """Saved by either and loaded by either, before the first step and after some."""
    models = both(make)
    train(models)
    files = []
    for model, optimizer in models:
        file = io.BytesIO()
        torch.save([model.module.state_dict(), optimizer.state_dict()], file)
        files.append(file)
        pickle.loads(pickle.dumps(optimizer.state_dict()))
        copy.deepcopy(optimizer.state_dict())
    for file in files:
        again = both(make)
        if file is files[1]:
            train(again, range(2))
        for model, optimizer in again:
            file.seek(0)
            of_model, of_optimizer = torch.load(file, weights_only=True)
            model.module.load_state_dict(of_model)
            optimizer.load_state_dict(of_optimizer)
        train(again, range(5, 8))
        assert_alike(again)
    train(models, range(5, 8))
    assert_alike([models[0], again[1]])


def test_what_programs_do_beside_it() -> None:
    """A GradScaler, an average that is swapped in, a clamp, a state that is reset, tied layers."""
    models = both(MAKERS["AdamW"])
    results = []
    for model, optimizer in models:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        average = torch.optim.swa_utils.AveragedModel(
            model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        for seed in range(8):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            with model.no_sync():
                scaler.scale(loss_of(model, share(batch_of(2, 6)))).backward()
            loss = loss_of(model, share(batch_of(2, 6)))
            scaler.scale(loss if seed != 4 else loss * float("inf")).backward()
            scaler.unscale_(optimizer)
            results.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(model.module)
            if seed == 3:
                kept = [p.detach().clone() for p in model.parameters()]
                for p, mean in zip(model.parameters(), average.module.parameters(), strict=True):
                    p.data.copy_(mean.data)
                results.append(model(torch.ones(2, 6)).detach())
                for p, value in zip(model.parameters(), kept, strict=True):
                    p.data = value
            if seed == 5:
                with torch.no_grad():
                    model.module[0].weight.clamp_(-0.1, 0.1)
                optimizer.state.pop(model.module[2].bias)
            if seed == 6:
                state = optimizer.state[model.module[0].bias]
                state["exp_avg"] = state["exp_avg"] * 0.5
    assert_alike(models)
    with together():
        half = len(results) // 2  # some norm is a NaN
        torch.testing.assert_close(results[half:], results[:half], rtol=0, atol=0, equal_nan=True)


def test_that_cannot_be_divided() -> None:
    """It steps whole parameters, each rank its own, and says so once."""
    models = both(lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3))
    for model, optimizer in models:
        for seed in range(3):
            torch.manual_seed(seed)
            batch = share(batch_of(2, 6))

            def closure(model: DDP = model, optimizer: Any = optimizer, batch: Any = batch) -> Any:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            if model is models[1][0] and seed == 0 and RANK == 0:
                with pytest.warns(UserWarning, match="LBFGS steps whole parameters"):
                    optimizer.step(closure)
            else:
                optimizer.step(closure)
    with together():
        (plain, _), (model, _) = models
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.mpi(min_size=2)
def test_settings_that_differ() -> None:
    _, (model, optimizer) = both(MAKERS["SGD"])
    loss_of(model, share(batch_of(2, 6))).backward()
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + RANK)
    with together(), pytest.raises(RuntimeError, match=r"different settings.*'lr'"):
        optimizer.step()


def test_a_group_that_is_taken_out() -> None:
    _, (model, optimizer) = both(lambda params: torch.optim.SGD([{"params": params}], lr=0.1))
    train([(model, optimizer)])
    optimizer.param_groups.clear()
    with together(), pytest.raises(RuntimeError, match="a group was taken out"):
        optimizer.step()


def test_by_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be shared is told, and trained as without it."""
    monkeypatch.setenv("MPIDDP_SHARED_PARAMETERS", "1")
    with together():
        assert (DDP(module())._shared_parameters is not None) == (SIZE > 1)
    bare = nn.Sequential(nn.Embedding(10, 6, sparse=True), module())
    told = pytest.warns(UserWarning, match="sparse") if RANK == 0 else contextlib.nullcontext()
    with told:
        model = DDP(bare)
    with together():
        assert model._shared_parameters is None
    assert DDP(module(), shared_parameters=False)._shared_parameters is None

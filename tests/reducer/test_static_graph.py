"""static_graph=True: the first backward tells what to expect of all others, as in torch's class."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import GivenGradients, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    assert_gradients_close,
    assert_replicated,
    gather,
    gradients_of,
    share,
    together,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from mpiddp import DistributedDataParallel as DDP

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides"),
]

STEPS = 4  # learn, rebuild (torch: a step later), and twice more


def wrap_both(
    module: nn.Module, group: dist.ProcessGroup, **options: object
) -> tuple[DDP, TorchDDP]:
    options = {"static_graph": True, **options}
    return (
        DDP(copy.deepcopy(module), **options),
        TorchDDP(copy.deepcopy(module), process_group=group, **options),
    )


class Checkpointed(nn.Module):
    """One layer used in several checkpoints, another in one, a third in none."""

    def __init__(self, reentrant: bool, uses: int = 3, unused: bool = False) -> None:
        super().__init__()
        self.first = mlp(4, 4)
        self.shared = mlp(4, 4)
        self.once = mlp(4, 4)
        self.last = mlp(4, 2)
        if unused:
            self.unused = mlp(4, 4)
        self.how: dict[str, Any] = {"use_reentrant": reentrant}
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for _ in range(self.uses):
            y = checkpoint(self.shared, y, **self.how).tanh()
        y = checkpoint(self.once, y, **self.how)
        z: Tensor = self.last(y)
        return z


class BeginsInCheckpoint(nn.Module):
    """Its last gradients come in a backward inside of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = mlp(4, 4)
        self.last = mlp(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = checkpoint(self.shared, x, use_reentrant=True)
        y = checkpoint(self.shared, y, use_reentrant=True)
        z: Tensor = self.last(y)
        return z


class Twice(nn.Module):
    """A layer used twice, and one that takes part in an output but not in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4, 4)
        self.head = mlp(4, 2)
        self.idle = mlp(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.body(x).tanh()))
        self.idle(x)
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: mlp(4, 5, 4, 2),
    "reentrant": lambda: Checkpointed(True),
    "not reentrant": lambda: Checkpointed(False),
    "reentrant with unused": lambda: Checkpointed(True, unused=True),
    "not reentrant with unused": lambda: Checkpointed(False, unused=True),
    "begins in a checkpoint": BeginsInCheckpoint,
    "used twice": Twice,
}


@pytest.mark.essential(keep=4)
@pytest.mark.smoke(keep=1)
@pytest.mark.thorough(keep=9)
@pytest.mark.parametrize("find_unused", [False, True], ids=["", "find_unused_parameters"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true")
def test_gradients(name, find_unused, views, gloo):
    pair = wrap_both(
        MODELS[name](),
        gloo,
        gradient_as_bucket_view=views,
        find_unused_parameters=find_unused,
        bucket_cap_mb=3e-4,
    )
    for step in range(STEPS):
        x = share(torch.randn(2 * SIZE, 4, dtype=torch.float64))
        for model in pair:
            model.zero_grad(set_to_none=step != 2)
            loss_of(model, x).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair), 4)
        assert_replicated(pair[0])


def test_buckets_are_launched_during_backward():
    """After the first one: an unused parameter, or a second use, holds up its own bucket only."""
    wrapped = DDP(Checkpointed(True, unused=True), static_graph=True, bucket_cap_mb=1e-4)
    counted: list[int] = []
    for _ in range(3):
        x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
        before = wrapped.reducer.channel.engine.counters["submitted"]
        x.register_hook(
            lambda _, before=before: counted.append(
                wrapped.reducer.channel.engine.counters["submitted"] - before
            )
        )
        wrapped.zero_grad()
        # The input's gradient comes last of all.
        loss_of(wrapped, x).backward()
    with together():
        # The last layer of backward, and those never used, are not yet full by then.
        assert counted[0] == 0
        assert counted[2] >= 3


@pytest.mark.mpi(min_size=2)
def test_other_parameters_on_each_rank(views):
    """A rank without a gradient counts as zero; where no rank has one, nothing is touched."""
    model = GivenGradients(**{name: torch.zeros(3) for name in "abcd"})
    wrapped = DDP(model, static_graph=True, gradient_as_bucket_view=views, bucket_cap_mb=1e-6)
    names = "a" + ("b" if RANK == 0 else "") + ("c" if RANK == SIZE - 1 else "")
    for step in range(STEPS):
        wrapped.zero_grad()
        ones = {n: torch.full((3,), step + 1.0) for n in names}
        wrapped(ones).backward()
        with together():
            assert torch.equal(model.a.grad, torch.full((3,), step + 1.0))
            for name in "bc":
                grad = model.get_parameter(name).grad
                assert torch.equal(grad, torch.full((3,), (step + 1.0) / SIZE))
            assert model.d.grad is None


@pytest.mark.mpi(min_size=2)
def test_rank_that_uses_no_parameter_at_all():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x) if RANK == 0 else x
            return y

    wrapped = DDP(Model(), static_graph=True)
    for _ in range(STEPS):
        wrapped.zero_grad()
        x = torch.ones(SIZE, 3, dtype=torch.float64, requires_grad=True)
        (wrapped(x * 1) * 1).sum().backward()
        with together():
            assert wrapped.module.layer[0].bias.grad.tolist() == [1.0] * 3
        assert_replicated(wrapped)


@pytest.mark.parametrize("first", ["first", "later"])
@pytest.mark.parametrize("name", ["plain", "not reentrant"])
def test_accumulation_under_no_sync(name, first, views, gloo):
    """Also in the very first backward, where torch's class fails an internal assertion."""
    pair = wrap_both(MODELS[name](), gloo, gradient_as_bucket_view=views)
    if first == "first":
        pair = (pair[0], DDP(copy.deepcopy(pair[1].module)))
    else:
        for model in pair:
            loss_of(model, torch.ones(2, 4, dtype=torch.float64)).backward()
    for step in range(6):
        x = share(torch.randn(2 * SIZE, 4, dtype=torch.float64))
        for model in pair:
            if step % 2:
                loss_of(model, x).backward()
            else:
                model.zero_grad()
                with model.no_sync():
                    loss_of(model, x).backward()
        if step % 2:
            with together():
                assert_gradients_close(*map(gradients_of, pair), 4)
            assert_replicated(pair[0])


def test_zero_grad_between_forward_and_backward(views, gloo):
    pair = wrap_both(Twice(), gloo, gradient_as_bucket_view=views)
    for _ in range(STEPS):
        x = share(torch.randn(2 * SIZE, 4, dtype=torch.float64))
        for model in pair:
            loss = loss_of(model, x)
            model.zero_grad()
            loss.backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair), 4)


def test_old_gradients_of_unused_parameters_stay(views, gloo):
    pair = wrap_both(Twice(), gloo, gradient_as_bucket_view=views)
    for model in pair:
        for parameter in model.module.idle.parameters():
            parameter.grad = torch.full_like(parameter, RANK + 0.5)
    for _ in range(STEPS):
        x = share(torch.randn(2 * SIZE, 4, dtype=torch.float64))
        for model in pair:
            model.module.body.zero_grad()
            model.module.head.zero_grad()
            loss_of(model, x).backward()
        with together():
            if not views:  # with views, torch's class averages them
                assert_gradients_close(*map(gradients_of, pair), 4)
            for parameter in pair[0].module.idle.parameters():
                assert torch.equal(parameter.grad, torch.full_like(parameter, RANK + 0.5))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


class _Ends(nn.Module):
    """Backward comes to `idle`, but brings no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp(4, 2)
        self.idle = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + _NoGradient.apply(self.idle)
        return y


def test_function_that_gives_no_gradient(views):
    """The hook of its parameter runs all the same: an old gradient stays the rank's own."""
    wrapped = DDP(_Ends(), static_graph=True, gradient_as_bucket_view=views)
    idle = wrapped.module.idle
    idle.grad = torch.full_like(idle, RANK + 0.5)
    for _ in range(STEPS):
        wrapped.module.layer.zero_grad()
        loss_of(wrapped, share(torch.randn(2 * SIZE, 4, dtype=torch.float64))).backward()
        assert_replicated(wrapped.module.layer)
        with together():
            assert idle.grad.tolist() == [RANK + 0.5] * 2


def test_two_forwards_before_one_backward(gloo):
    pair = wrap_both(mlp(4, 5, 2), gloo)
    for _ in range(STEPS):
        batches = share(torch.randn(2 * SIZE, 2, 4, dtype=torch.float64))
        for model in pair:
            model.zero_grad()
            (loss_of(model, batches[0]) + loss_of(model, batches[1])).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair), 4)


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_still_reduce(copier, trained):
    """A copy of torch's class does not: it takes over that its first reduction is arranged."""
    wrapped = DDP(Checkpointed(True, unused=True), static_graph=True)
    x = torch.randn(2 * SIZE, 4, dtype=torch.float64)
    if trained:
        for _ in range(2):
            loss_of(wrapped, share(x)).backward()
        wrapped.zero_grad()
    copied = copier(wrapped)
    for _ in range(STEPS):
        copied.zero_grad()
        wrapped.zero_grad()
        loss_of(copied, share(x)).backward()
        loss_of(wrapped, share(x)).backward()
        with together():
            assert copied.static_graph
            assert copied._get_ddp_logging_data()["static_graph"] == 1
            assert_gradients_close(gradients_of(copied), gradients_of(wrapped))
        assert_replicated(copied)


class TestSetStaticGraph:
    @pytest.mark.essential
    def test_after_construction(self, gloo):
        pair = (
            DDP(Twice()),
            TorchDDP(Twice(), process_group=gloo),
        )
        pair[1].load_state_dict(pair[0].state_dict())
        for model in pair:
            model._set_static_graph()
            with pytest.warns(UserWarning, match="no need to set it again"):
                model._set_static_graph()
        for _ in range(STEPS):
            x = share(torch.randn(2 * SIZE, 4, dtype=torch.float64))
            for model in pair:
                model.zero_grad()
                loss_of(model, x).backward()
            with together():
                assert_gradients_close(*map(gradients_of, pair), 4)

    def test_after_a_forward(self, gloo):
        for model in (DDP(mlp(4, 2)), TorchDDP(mlp(4, 2), process_group=gloo)):
            loss_of(model, torch.ones(2, 4, dtype=torch.float64)).backward()
            with together(), pytest.raises(RuntimeError, match="before training loop starts"):
                model._set_static_graph()

    def test_with_find_unused_parameters(self, gloo):
        for wrap, options in ((DDP, {}), (TorchDDP, {"process_group": gloo})):
            with together(), pytest.warns(UserWarning, match="will detect unused parameters"):
                wrap(mlp(4, 2), static_graph=True, find_unused_parameters=True, **options)


class TestGraphThatChanges:
    def step(self, wrapped: DDP, names: str) -> None:
        wrapped({name: torch.ones(3) for name in names}).backward()

    def wrapped(self, names: str = "ab", **options: object) -> DDP:
        model = GivenGradients(**{name: torch.zeros(3) for name in names})
        return DDP(model, static_graph=True, **options)

    @pytest.mark.essential
    def test_parameter_used_for_the_first_time(self, gloo):
        ours = self.wrapped()
        theirs = TorchDDP(copy.deepcopy(ours.module), static_graph=True, process_group=gloo)
        for model in (ours, theirs):
            self.step(model, "a")
            with together(), pytest.raises(RuntimeError, match="graph has changed"):
                self.step(model, "ba")
        fresh = self.wrapped()
        self.step(fresh, "a")
        with together(), pytest.raises(RuntimeError, match=r"'b' of shape \(3,\)"):
            self.step(fresh, "ba")

    def test_parameter_no_longer_used(self, views):
        wrapped = self.wrapped(gradient_as_bucket_view=views, find_unused_parameters=False)
        self.step(wrapped, "ab")
        wrapped.zero_grad()
        self.step(wrapped, "a" if RANK == SIZE - 1 else "ab")
        with together(), pytest.raises(RuntimeError) as caught:
            self.step(wrapped, "ab")
        with together():
            text = str(caught.value)
            assert "Expected to have finished reduction" in text
            assert f"'b' of shape (3,), bucket 0, on rank {SIZE - 1}" in text
            assert "static_graph" in text
        # Apart from the lines on what each rank itself has missed.
        assert len(set(gather(text[text.index("These parameters") :]))) == 1
        # What was reduced is the mean of what there was.
        with together():
            assert wrapped.module.a.grad.tolist() == [1.0] * 3

    def test_used_more_often(self):
        model = Checkpointed(True, uses=1)
        wrapped = DDP(model, static_graph=True)
        x = torch.randn(2, 4, dtype=torch.float64)
        loss_of(wrapped, x).backward()
        model.uses = 2
        said = r"graph has changed.*'shared\.0\.\w+'"
        with together(), pytest.raises(RuntimeError, match=said):
            loss_of(wrapped, x).backward()

    def test_used_less_often(self):
        """The parameter waits for a use that never comes: all ranks say so."""
        model = Checkpointed(True, uses=2)
        wrapped = DDP(model, static_graph=True)
        x = torch.randn(2, 4, dtype=torch.float64)
        loss_of(wrapped, x).backward()
        model.uses = 1
        loss_of(wrapped, x).backward()
        with together(), pytest.raises(RuntimeError, match=r"'shared\.0\.weight'.*static_graph"):
            loss_of(wrapped, x).backward()


def test_without_it_the_error_says_to_set_it():
    wrapped = DDP(Checkpointed(True))
    with together(), pytest.raises(RuntimeError) as caught:
        loss_of(wrapped, torch.randn(2, 4, dtype=torch.float64)).backward()
    with together():
        assert "ready only once" in str(caught.value)
        assert "'shared.0." in str(caught.value)
        assert "pass static_graph=True" in str(caught.value)

"""Gradients accumulated over several forward and backward calls are those of one process."""

import copy
from contextlib import nullcontext

import pytest
import torch
from models import CASES, GivenGradients, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    all_bits,
    assert_gradients_close,
    assert_replicated,
    batch_of,
    bits,
    gather,
    gradients_of,
    share,
    together,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi


def batches(count: int) -> list[Tensor]:
    return [batch_of(2, 3, dtype=torch.float64) for _ in range(count)]


@pytest.mark.essential(keep=4)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("to_none", [True, False], ids=["dropped", "zeroed"])
@pytest.mark.parametrize("case", ["mlp", "tied", "odd layouts", "mixed dtypes"])
def test_no_sync(case, to_none, views):
    """Two steps under no_sync and one outside equal one process that does all three."""
    model = CASES[case].make()
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for _ in range(3):
        alone = copy.deepcopy(model)
        wrapped.zero_grad(set_to_none=to_none)
        for step in range(3):
            batch = CASES[case].batch(2 * SIZE)
            loss_of(alone, batch).backward()
            with wrapped.no_sync() if step < 2 else nullcontext():
                loss_of(wrapped, share(batch)).backward()
        with together():
            assert_gradients_close(
                gradients_of(wrapped), gradients_of(alone), 2, CASES[case].rounding
            )
        assert_replicated(wrapped)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.05)


@pytest.mark.mpi(min_size=2)
def test_no_sync_keeps_gradients_to_the_rank(views):
    model = mlp(3, 4, 2)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for _ in range(3):
        batch = batch_of(2, 3, dtype=torch.float64)
        alone = copy.deepcopy(model)
        loss_of(alone, share(batch)).backward()
        wrapped.zero_grad()
        with wrapped.no_sync():
            loss_of(wrapped, share(batch)).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), gradients_of(alone))
        assert len({str(digests) for digests in gather(all_bits(gradients_of(wrapped).items()))}) \
            == SIZE  # fmt: skip
        # So that the next round is after the rebuilding of buckets.
        loss_of(wrapped, share(batch)).backward()


@pytest.mark.parametrize("forward_inside", [True, False], ids=["in-", "out-"])
@pytest.mark.parametrize("backward_inside", [True, False], ids=["in", "out"])
def test_forward_and_backward_in_and_out_of_no_sync(forward_inside, backward_inside, views):
    """Where forward ran decides whether backward is averaged; the sum is right in any case."""
    model = mlp(3, 4, 2)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for _ in range(3):
        first, second = batches(2)
        alone = copy.deepcopy(model)
        wrapped.zero_grad()
        with wrapped.no_sync() if forward_inside else nullcontext():
            loss = loss_of(wrapped, share(first))
        with wrapped.no_sync() if backward_inside else nullcontext():
            loss.backward()
        if forward_inside:
            loss_of(alone, share(first)).backward()
        else:
            loss_of(alone, first).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), gradients_of(alone), 2)
        loss_of(wrapped, share(second)).backward()
        alone.zero_grad()
        (loss_of(alone, first) + loss_of(alone, second)).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), gradients_of(alone), 2)
        assert_replicated(wrapped)


def test_no_sync_nested(views):
    model = GivenGradients(p=torch.zeros(2))
    wrapped = DDP(model, gradient_as_bucket_view=views)
    own, mean = RANK + 1.0, (SIZE + 1) / 2

    def step() -> float:
        wrapped({"p": torch.full((2,), own)}).backward()
        return float(model.p.grad[1])

    with together():
        with wrapped.no_sync():
            with wrapped.no_sync():
                assert step() == own
            assert step() == 2 * own
        assert step() == 3 * mean
    # An exception leaves no_sync as well.
    with together():
        model.p.grad = None
        with pytest.raises(KeyError), wrapped.no_sync():
            raise KeyError
        assert step() == mean


def test_all_under_no_sync(views):
    """Who never leaves no_sync never talks to others, so ranks may do it unequally often."""
    model = mlp(3, 4, 2)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    with wrapped.no_sync():
        for _ in range(RANK):
            loss_of(wrapped, torch.ones(2, 3, dtype=torch.float64)).backward()
    with together():
        assert (model[0].weight.grad is None) == (RANK == 0)


def test_accumulation_without_no_sync(views):
    """Each backward averages; what was averaged before stays what it was."""
    model = mlp(3, 4, 2)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    alone = copy.deepcopy(model)
    for batch in batches(4):
        loss_of(alone, batch).backward()
        loss_of(wrapped, share(batch)).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), gradients_of(alone), 10)
        assert_replicated(wrapped)


def test_several_forwards_before_one_backward(views):
    model = mlp(3, 4, 2)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for _ in range(3):
        alone = copy.deepcopy(model)
        wrapped.zero_grad()
        parts = batches(3)
        sum(loss_of(alone, batch) for batch in parts).backward()
        sum(loss_of(wrapped, share(batch)) for batch in parts).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), gradients_of(alone), 2)
        assert_replicated(wrapped)


def test_forward_without_backward_between(views):
    """Evaluation between forward and backward, and forwards that are never followed by one."""
    model = mlp(3, 4, 2)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for batch in batches(3):
        alone = copy.deepcopy(model)
        loss_of(alone, batch).backward()
        wrapped.zero_grad()
        wrapped(share(batch))
        loss = loss_of(wrapped, share(batch))
        wrapped.eval()
        with torch.no_grad():
            wrapped(share(batch))
        wrapped.train()
        loss.backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), gradients_of(alone))
        assert_replicated(wrapped)


def test_two_models_in_turn(views):
    models = [mlp(3, 4, 2), mlp(3, 6, 2)]
    pair = [DDP(model, gradient_as_bucket_view=views) for model in models]
    for step, batch in enumerate(batches(6)):
        model, wrapped = models[step % 2], pair[step % 2]
        alone = copy.deepcopy(model)
        loss_of(alone, batch).backward()
        wrapped.zero_grad()
        loss_of(wrapped, share(batch)).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), gradients_of(alone))
        assert_replicated(wrapped)


def test_two_models_in_one_loss(views):
    """Their gradients arrive mixed, and on each rank in another order."""
    models = [mlp(3, 4, 4, 2), mlp(3, 6, 2)]
    pair = [DDP(m, gradient_as_bucket_view=views, bucket_cap_mb=1e-6) for m in models]
    for step, batch in enumerate(batches(5)):
        alone = copy.deepcopy(models)
        (loss_of(alone[0], batch) + loss_of(alone[1], batch)).backward()
        # Forward calls are collective until buckets have been rebuilt.
        order = pair if step < 2 or (RANK + step) % 2 else pair[::-1]
        for wrapped in pair:
            wrapped.zero_grad()
        sum(loss_of(wrapped, share(batch)) for wrapped in order).backward()
        for wrapped, plain in zip(pair, alone, strict=True):
            with together():
                assert_gradients_close(gradients_of(wrapped), gradients_of(plain), 2)
            assert_replicated(wrapped)


def test_one_model_inside_of_another_loss(views):
    """A chain: the second model's input is the first one's output."""
    models = [mlp(3, 4), mlp(4, 2)]
    pair = [DDP(m, gradient_as_bucket_view=views) for m in models]
    for batch in batches(3):
        alone = nn.Sequential(*copy.deepcopy(models))
        loss_of(alone, batch).backward()
        for wrapped in pair:
            wrapped.zero_grad()
        pair[1](pair[0](share(batch))).abs().square().mean().backward()
        for wrapped, plain in zip(pair, alone, strict=True):
            with together():
                assert_gradients_close(gradients_of(wrapped), gradients_of(plain))


@pytest.mark.essential(keep=1)
def test_autograd_grad_averages_nothing(views):
    """autograd.grad returns the rank's own gradients and leaves .grad and the next step alone."""
    model = mlp(3, 4, 2)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    parameters = list(model.parameters())
    for batch in batches(3):
        alone = copy.deepcopy(model)
        plain = torch.autograd.grad(loss_of(alone, share(batch)), list(alone.parameters()))
        wrapped.zero_grad()
        submitted = wrapped.process_group.engine.counters["submitted"]
        own = torch.autograd.grad(loss_of(wrapped, share(batch)), parameters)
        with together():
            assert all(torch.equal(a, b) for a, b in zip(own, plain, strict=True))
            assert all(parameter.grad is None for parameter in parameters)
            assert wrapped.process_group.engine.counters["submitted"] == submitted
        loss_of(alone, batch).backward()
        loss_of(wrapped, share(batch)).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), gradients_of(alone))


@pytest.mark.essential(keep=1)
def test_gradient_penalty(views):
    """A loss that itself contains a gradient with respect to the input."""
    model = mlp(3, 4, 1)
    wrapped = DDP(model, gradient_as_bucket_view=views)

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_()
        output = module(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.mean() + slope.square().mean()

    for batch in batches(3):
        alone = copy.deepcopy(model)
        loss(alone, batch).backward()
        wrapped.zero_grad()
        loss(wrapped, share(batch)).backward()
        with together():
            # The last bias is not in the slope, but in the output.
            assert_gradients_close(gradients_of(wrapped), gradients_of(alone), 2)
        assert_replicated(wrapped)


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = mlp(3, 4)
        self.body = mlp(4, 5, 4)
        self.last = mlp(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)
        out: Tensor = self.last(y)
        return out


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_activation_checkpointing(reentrant, views):
    model = _Checkpointed(reentrant)
    wrapped = DDP(model, gradient_as_bucket_view=views, bucket_cap_mb=1e-4)
    for batch in batches(3):
        alone = copy.deepcopy(model)
        loss_of(alone, batch).backward()
        wrapped.zero_grad()
        loss_of(wrapped, share(batch)).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), gradients_of(alone))
        assert_replicated(wrapped)


def test_checkpointing_of_a_module_used_twice(views):
    class Twice(_Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            for _ in range(2):
                y = checkpoint(self.body, y, use_reentrant=False)
            out: Tensor = self.last(y)
            return out

    model = Twice(False)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for batch in batches(3):
        alone = copy.deepcopy(model)
        loss_of(alone, batch).backward()
        wrapped.zero_grad()
        loss_of(wrapped, share(batch)).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), gradients_of(alone))


def test_collectives_of_the_user_meanwhile(views):
    """A backward that itself calls collectives of torch.distributed does not meet ours."""
    model = mlp(3, 4, 2)
    wrapped = DDP(model, gradient_as_bucket_view=views, bucket_cap_mb=1e-6)
    sums = []

    def all_reduce(gradient: Tensor) -> None:
        total = torch.full((3,), float(RANK))
        torch.distributed.all_reduce(total)
        sums.append(bits(total))

    model[2].weight.register_hook(all_reduce)
    for batch in batches(3):
        alone = copy.deepcopy(model)
        loss_of(alone, batch).backward()
        wrapped.zero_grad()
        loss_of(wrapped, share(batch)).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), gradients_of(alone))
            assert set(sums) == {bits(torch.full((3,), SIZE * (SIZE - 1) / 2))}

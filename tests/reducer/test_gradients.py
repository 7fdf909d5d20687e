"""Gradients of N ranks on their shares of a batch are those of one process on the whole batch."""

import copy

import pytest
import torch
from models import CASES, GivenGradients, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    STEPS,
    all_bits,
    assert_close,
    assert_gradients_close,
    assert_replicated,
    batch_of,
    bits,
    gather,
    gradients_of,
    lies_in_buckets,
    mean_of_ranks,
    share,
    together,
    train_and_compare,
    wide_dtype,
)
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP

pytestmark = [pytest.mark.mpi, pytest.mark.sizes]


@pytest.mark.essential(keep=4)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_whole_batch(case, views):
    """One process on the whole batch, through several steps and the rebuilding of buckets."""
    model = CASES[case].make()
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for _ in range(STEPS):
        batch = CASES[case].batch(3 * SIZE)
        alone = copy.deepcopy(model)
        loss_of(alone, batch).backward()
        wrapped.zero_grad()
        loss_of(wrapped, share(batch)).backward()
        with together():
            assert_gradients_close(
                gradients_of(wrapped), gradients_of(alone), 1, CASES[case].rounding
            )
        assert_replicated(wrapped)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)


@pytest.mark.essential(keep=4)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_mean_of_ranks(case, views):
    """The mean of what the ranks compute, which rounds no differently from it."""
    batches = [CASES[case].batch(2) for _ in range(SIZE)]
    train_and_compare(
        CASES[case].make(),
        lambda model, rank: loss_of(model, batches[rank]),
        {"gradient_as_bucket_view": views},
    )


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_gradients_are_rounded_once(dtype, views):
    # Their float32 sum is exact in any order, so there is one right answer to the last bit. A
    # sum in 16 bits, or a division after rounding, gives another one.
    generator = torch.Generator().manual_seed(5)
    scale = torch.exp2(torch.randint(0, 6, (SIZE, 1000), generator=generator).float())
    draws = (torch.randn(SIZE, 1000, generator=generator).clamp(-3, 3) * scale).to(dtype)
    expected = (draws.double().sum(0).float() / SIZE).to(dtype)
    model = GivenGradients(p=torch.zeros(1000, dtype=dtype))
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for _ in range(STEPS):
        wrapped.zero_grad()
        wrapped({"p": draws[RANK]}).backward()
        with together():
            assert torch.equal(model.p.grad, expected)


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64],
    ids=str,
)
def test_bucket_of_several_chunks(dtype, views):
    """Gradients larger than what travels at once, of no round size."""
    count = 700_001
    whole_numbers = (torch.arange(count) % 251).to(dtype)
    model = GivenGradients(
        small=torch.zeros(3, dtype=dtype),
        large=torch.zeros(count, dtype=dtype),
        last=torch.zeros(1, dtype=dtype),
    )
    wrapped = DDP(model, gradient_as_bucket_view=views, init_sync=False)
    for step in range(2):
        coefficients = {
            name: whole_numbers[: parameter.numel()] * (RANK + step + 1)
            for name, parameter in model.named_parameters()
        }
        wrapped.zero_grad()
        wrapped(coefficients).backward()
        # Exact in float32, whatever the order.
        wide = wide_dtype(dtype)
        total = sum((whole_numbers * (rank + step + 1)).to(wide) for rank in range(SIZE))
        expected = (total / SIZE).to(dtype)
        with together():
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.grad, expected[: parameter.numel()]), name


def test_infinities_and_nans_reach_all_ranks(views):
    own = torch.full((4,), float(RANK))
    own[1] = float("inf") if RANK == 0 else 1
    own[2] = float("nan") if RANK == SIZE - 1 else 1
    model = GivenGradients(p=torch.zeros(4), q=torch.zeros(4))
    wrapped = DDP(model, gradient_as_bucket_view=views)
    wrapped({"p": own, "q": torch.ones(4)}).backward()
    with together():
        gradient = model.p.grad
        mean = sum(range(SIZE)) / SIZE
        assert gradient[0] == mean
        assert gradient[3] == mean
        assert gradient[1] == float("inf")
        assert gradient[2].isnan()
        assert torch.equal(model.q.grad, torch.ones(4))
    # Nor does it come back in the next step.
    wrapped.zero_grad()
    wrapped({"p": torch.ones(4), "q": torch.ones(4)}).backward()
    with together():
        assert torch.equal(model.p.grad, torch.ones(4))


class _OneGradientForTwo(torch.autograd.Function):
    """Gives two inputs gradients that overlap in memory."""

    @staticmethod
    def forward(ctx, a, b, memory):
        ctx.save_for_backward(memory)
        return a.sum() + b.sum()

    @staticmethod
    def backward(ctx, gradient):
        (memory,) = ctx.saved_tensors
        memory = memory * gradient
        return memory[:4], memory[2:], None


class _Overlapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4))
        self.b = nn.Parameter(torch.zeros(4))

    def forward(self, memory):
        return _OneGradientForTwo.apply(self.a, self.b, memory)


def test_gradients_that_overlap_each_other(views):
    memories = [torch.arange(6.0) * (rank + 1) for rank in range(SIZE)]
    train_and_compare(
        _Overlapping(),
        lambda model, rank: model(memories[rank]),
        {"gradient_as_bucket_view": views},
        # Adding to such gradients in place counts twice, in plain torch too.
        zero_in_place=False,
    )


class _OverlapsItself(torch.autograd.Function):
    """Gives its input a gradient whose elements share memory."""

    @staticmethod
    def forward(ctx, a, row):
        ctx.save_for_backward(row)
        return a.sum()

    @staticmethod
    def backward(ctx, gradient):
        (row,) = ctx.saved_tensors
        return (row * gradient).as_strided((3, 4), (1, 1)), None


class _SelfOverlapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3, 4))

    def forward(self, row):
        return _OverlapsItself.apply(self.a, row)


def test_gradient_that_overlaps_itself(views):
    rows = [torch.arange(6.0) + rank for rank in range(SIZE)]
    train_and_compare(
        _SelfOverlapping(),
        lambda model, rank: model(rows[rank]),
        {"gradient_as_bucket_view": views},
    )


class _LazyGradient(torch.autograd.Function):
    """Gives a gradient that is negated or conjugated only when somebody reads it."""

    @staticmethod
    def forward(ctx, a, coefficient):
        ctx.save_for_backward(coefficient)
        total = a.sum()
        return total.real if total.is_complex() else total

    @staticmethod
    def backward(ctx, gradient):
        (coefficient,) = ctx.saved_tensors
        coefficient = coefficient.clone()
        if coefficient.is_complex():
            return coefficient.conj(), None
        return torch._neg_view(coefficient), None


class _Lazy(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, coefficient, lazy):
        if lazy:
            loss = _LazyGradient.apply(self.a, coefficient)
        else:
            loss = (self.a * coefficient).sum()
        return loss.real if loss.is_complex() else loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "rank 0"])
def test_lazily_negated_and_conjugated_gradients(everywhere, dtype, views):
    coefficients = [torch.tensor([1, 2, 3]).to(dtype) + rank for rank in range(SIZE)]
    if dtype.is_complex:
        coefficients = [c * (1 + 2j) for c in coefficients]
    train_and_compare(
        _Lazy(dtype),
        lambda model, rank: model(coefficients[rank], everywhere or rank == 0),
        {"gradient_as_bucket_view": views},
    )


class _Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.vector = nn.Parameter(torch.ones(5))
        self.matrix = nn.Parameter(torch.ones(4, 3).t())

    def forward(self, factor):
        return factor * (self.vector.sum() + self.matrix.sum())


def test_expanded_gradients(views):
    train_and_compare(
        _Sums(),
        lambda model, rank: model(torch.tensor(rank + 1.0)),
        {"gradient_as_bucket_view": views},
    )


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_gradients_set_by_hand(views):
    """A gradient of any strides that the user set is accumulated into and averaged."""
    model = GivenGradients(p=torch.zeros(3, 4), q=torch.zeros(3, 4), r=torch.zeros(4, 3).t())
    wrapped = DDP(model, gradient_as_bucket_view=views)
    own = torch.arange(12.0).view(3, 4) * (RANK + 1)
    mean = torch.arange(12.0).view(3, 4) * (SIZE + 1) / 2
    for _ in range(2):
        model.p.grad = torch.full((4, 3), 2.0 * RANK).t()
        model.q.grad = torch.zeros(3, 8)[:, ::2]
        model.r.grad = torch.full((3, 4), 2.0 * RANK)
        wrapped({"p": own, "q": own, "r": own}).backward()
        with together():
            assert torch.equal(model.p.grad, mean + SIZE - 1)
            assert torch.equal(model.q.grad, mean)
            assert torch.equal(model.r.grad, mean + SIZE - 1)


@pytest.mark.essential(keep=1)
def test_gradient_layout(views):
    """Each gradient has its parameter's strides; with views it lives in its bucket."""
    model = CASES["odd layouts"].make()
    wrapped = DDP(model, gradient_as_bucket_view=views)
    batch = share(CASES["odd layouts"].batch(2 * SIZE))
    for _ in range(STEPS):
        wrapped.zero_grad()
        loss_of(wrapped, batch).backward()
        with together():
            for name, parameter in model.named_parameters():
                if parameter.numel() == 0:
                    continue
                if name != "sliced":  # has gaps, which a gradient has not
                    assert parameter.grad.stride() == parameter.stride(), name
                assert lies_in_buckets(wrapped, parameter.grad) == views, name


def test_gradient_tensors_stay_the_same_objects(views):
    """Who zeroes gradients in place keeps them: nothing replaces them behind the user's back."""
    model = mlp(3, 4, 2)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    batch = share(batch_of(2, 3, dtype=torch.float64))
    for _ in range(STEPS):  # with views, rebuilding buckets moves them once
        wrapped.zero_grad(set_to_none=False)
        loss_of(wrapped, batch).backward()
    before = [parameter.grad for parameter in model.parameters()]
    wrapped.zero_grad(set_to_none=False)
    loss_of(wrapped, batch).backward()
    with together():
        assert all(a is p.grad for a, p in zip(before, model.parameters(), strict=True))


def test_gradients_carry_no_graph(views):
    model = mlp(3, 2)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    loss_of(wrapped, share(batch_of(2, 3, dtype=torch.float64))).backward()
    with together():
        for parameter in model.parameters():
            assert parameter.grad.is_leaf
            assert not parameter.grad.requires_grad


def test_frozen_parameters_have_no_part(views):
    model = mlp(3, 4, 4, 2)
    model[2].requires_grad_(False)
    before = all_bits(model[2].named_parameters())
    batches = [torch.randn(2, 3, dtype=torch.float64) for _ in range(SIZE)]
    train_and_compare(
        model,
        lambda module, rank: loss_of(module, batches[rank]),
        {"gradient_as_bucket_view": views},
    )
    with together():
        assert all(parameter.grad is None for parameter in model[2].parameters())
        assert all_bits(model[2].named_parameters()) == before


@pytest.mark.essential(keep=1)
def test_hooks_of_the_user_see_what_autograd_gives(views):
    """A hook on the parameter's gradient changes what is averaged; on the mean it sees nothing."""
    model = GivenGradients(p=torch.zeros(3))
    model.p.register_hook(lambda gradient: 2 * gradient)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    wrapped({"p": torch.full((3,), float(RANK))}).backward()
    with together():
        assert torch.equal(model.p.grad, torch.full((3,), float(SIZE - 1)))


def test_inputs_get_their_own_gradients(views):
    """Gradients of inputs belong to the rank and are not averaged."""
    model = mlp(3, 4, 2)
    batch = batch_of(2, 3, dtype=torch.float64)
    own = share(batch).clone().requires_grad_()
    plain = own.detach().clone().requires_grad_()
    loss_of(copy.deepcopy(model), plain).backward()
    before = bits(own)
    loss_of(DDP(model, gradient_as_bucket_view=views), own).backward()
    with together():
        assert torch.equal(own.grad, plain.grad)
        assert bits(own) == before
    if SIZE > 1:
        assert len(set(gather(bits(own.grad)))) == SIZE


@pytest.mark.essential(keep=1)
def test_outputs_of_any_structure(views):
    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(3, 4)
            self.heads = nn.ModuleList([nn.Linear(4, 1, dtype=torch.float64) for _ in range(2)])

        def forward(self, x: Tensor) -> dict[str, object]:
            y = self.body(x)
            return {"a": [self.heads[0](y)], "rest": (self.heads[1](y), "text", None)}

    def loss(model, rank):
        output = model(batches[rank])
        return output["a"][0].sum() + output["rest"][0].square().sum()

    batches = [torch.randn(2, 3, dtype=torch.float64) for _ in range(SIZE)]
    for find in (False, True):
        train_and_compare(
            Structured(),
            loss,
            {"gradient_as_bucket_view": views, "find_unused_parameters": find},
        )


def test_uneven_shares_are_weighted_by_rank(views):
    """Each rank counts the same, however many rows it has: what torch's class does too."""
    model = mlp(3, 2)
    batches = [torch.randn(rank + 1, 3, dtype=torch.float64) for rank in range(SIZE)]
    expected = mean_of_ranks(model, lambda module, rank: loss_of(module, batches[rank]))
    wrapped = DDP(model, gradient_as_bucket_view=views)
    loss_of(wrapped, batches[RANK]).backward()
    with together():
        for name, gradient in gradients_of(wrapped).items():
            assert_close(gradient, expected[name], name)

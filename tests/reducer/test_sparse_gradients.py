"""Sparse gradients, of Embedding and EmbeddingBag, are averaged and stay sparse."""

import copy

import pytest
import torch
from replicas import (
    RANK,
    SIZE,
    assert_gradients_close,
    assert_replicated,
    bits,
    gradients_of,
    mean_of_ranks,
    together,
)
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi


class Words(nn.Module):
    """A model with a sparse and a dense part; it may leave either out."""

    def __init__(self, bag: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.words = (
            nn.EmbeddingBag(9, 4, sparse=True, mode="sum", dtype=dtype)
            if bag
            else nn.Embedding(9, 4, sparse=True, dtype=dtype)
        )
        self.dense = nn.Linear(4, 2, dtype=dtype)

    def forward(self, tokens: Tensor | None) -> Tensor:
        if tokens is None:
            x = torch.ones(1, 4, dtype=self.dense.weight.dtype)
        else:
            x = self.words(tokens)
        y: Tensor = self.dense(x).square().sum()
        return y


def tokens(rank: int, step: int = 0) -> Tensor:
    """Return tokens of a rank, some of which repeat and some of which others have too."""
    return torch.tensor([[rank, rank, 8], [step, (rank + step) % 9, 1]])


@pytest.mark.essential(keep=2)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("bag", [False, True], ids=["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_mean(bag, dtype, views):
    model = Words(bag, dtype)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for step in range(3):
        expected = mean_of_ranks(model, lambda module, rank, step=step: module(tokens(rank, step)))
        wrapped.zero_grad()
        wrapped(tokens(RANK, step)).backward()
        with together():
            assert model.words.weight.grad.is_sparse
            assert_gradients_close(gradients_of(wrapped), expected)
        assert_replicated(wrapped)


def test_steps_of_sgd(views):
    model = Words(bag=False)
    alone = copy.deepcopy(model)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (wrapped, alone)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        wrapped(tokens(RANK, step)).backward()
        (sum(alone(tokens(rank, step)) for rank in range(SIZE)) / SIZE).backward()
        for optimizer in optimizers:
            optimizer.step()
        with together():
            for name, parameter in model.named_parameters():
                assert torch.allclose(parameter, alone.get_parameter(name), atol=1e-5), name
        assert_replicated(wrapped)


def test_accumulation(views):
    model = Words(bag=False)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for _ in range(2):
        expected = mean_of_ranks(
            model, lambda module, rank: module(tokens(rank, 1)) + module(tokens(rank, 2))
        )
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(tokens(RANK, 1)).backward()
        wrapped(tokens(RANK, 2)).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), expected, 2)
        assert_replicated(wrapped)


@pytest.mark.mpi(min_size=2)
def test_unused_on_some_ranks(views):
    model = Words(bag=False)
    wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    for step in range(4):
        used_by = step % SIZE

        def loss(module, rank, used_by=used_by, step=step):
            return module(tokens(rank, step) if rank == used_by else None)

        expected = mean_of_ranks(model, loss)
        wrapped.zero_grad()
        loss(wrapped, RANK).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), expected)
        assert_replicated(wrapped)


def test_unused_on_every_rank(views):
    model = Words(bag=False)
    wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    for old in (None, "sparse"):
        for _ in range(2):
            wrapped.zero_grad()
            if old:
                model.words.weight.grad = torch.full((9, 4), RANK + 0.1).to_sparse(1)
            before = bits(model.words.weight.grad)
            wrapped(None).backward()
            with together():
                assert bits(model.words.weight.grad) == before
                assert model.dense.weight.grad is not None


@pytest.mark.mpi(min_size=2)
def test_unused_without_being_asked_is_an_error(views):
    model = Words(bag=False)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    expected = mean_of_ranks(model, lambda module, rank: module(None if rank else tokens(rank)))
    wrapped(tokens(RANK) if RANK == 0 else None).backward()
    with together():
        assert_gradients_close(gradients_of(wrapped), expected)
    with together(), pytest.raises(RuntimeError) as caught:
        wrapped(tokens(RANK))
    with together():
        assert "'words.weight'" in str(caught.value)
        assert "(9, 4)" in str(caught.value)
        assert "rank 1" in str(caught.value) or "ranks 1" in str(caught.value)
        assert "dense" not in str(caught.value)


def test_no_rank_has_a_token(views):
    """A sparse gradient without a single entry."""
    model = Words(bag=False)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.zeros(0, dtype=torch.int64)).backward()
        with together():
            gradient = model.words.weight.grad
            assert gradient.is_sparse
            assert gradient._nnz() == 0

"""Gradients of the differentiable operations, by the rules of Horovod 0.28."""

import pytest
import torch
from replicas import RANK, SIZE, gather, together

import mpiddp.horovod as hvd

pytestmark = [pytest.mark.mpi, pytest.mark.sizes, pytest.mark.timeout(60)]


def leaf(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64).add(RANK).requires_grad_()


def weights(*shape: int) -> torch.Tensor:
    """Return the gradient of an output, another one on each rank."""
    generator = torch.Generator().manual_seed(RANK + 5)
    return torch.rand(shape, dtype=torch.float64, generator=generator)


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("grouped", [False, True], ids=["single", "grouped"])
def test_allreduce_is_reduced_alike(op, grouped):
    x, w = leaf(3, 2), weights(3, 2)
    factors = {"prescale_factor": 2.0, "postscale_factor": 0.25}
    if grouped:
        other = leaf(4)
        y, z = hvd.grouped_allreduce([x, other], op=op, **factors)
        ((y * w).sum() + z.sum()).backward()
    else:
        (hvd.allreduce(x, op=op, **factors) * w).sum().backward()
    total = torch.stack(gather(w)).sum(0) * 0.5
    with together():
        torch.testing.assert_close(x.grad, total / SIZE if op == hvd.Average else total)


def test_compressed_allreduce_has_a_gradient_of_the_inputs_dtype():
    x = leaf(3)
    hvd.allreduce(x, compression=hvd.Compression.fp16).sum().backward()
    with together():
        assert torch.equal(x.grad, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("grouped", [False, True], ids=["single", "grouped"])
def test_allgather_gives_the_average_of_own_rows(grouped):
    x = leaf(RANK + 1, 2)
    rows = SIZE * (SIZE + 1) // 2
    w = weights(rows, 2)
    y = hvd.grouped_allgather([x])[0] if grouped else hvd.allgather(x)
    (y * w).sum().backward()
    mean = torch.stack(gather(w)).mean(0)
    start = RANK * (RANK + 1) // 2
    with together():
        torch.testing.assert_close(x.grad, mean[start : start + RANK + 1])


@pytest.mark.essential
def test_broadcast_gives_the_average_to_its_root():
    x, w, root = leaf(2, 2), weights(2, 2), SIZE - 1
    (hvd.broadcast(x, root) * w).sum().backward()
    mean = torch.stack(gather(w)).mean(0)
    with together():
        torch.testing.assert_close(x.grad, mean if root == RANK else torch.zeros_like(mean))


@pytest.mark.parametrize("left_out", [0, 2])
def test_alltoall_sends_gradients_back(left_out):
    splits = [rank + 1 for rank in range(SIZE)]
    x = leaf(sum(splits) + left_out, 2)
    y, received = hvd.alltoall(x, splits)
    (y * (RANK + 1)).sum().backward()
    expected = torch.zeros(sum(splits) + left_out, 2, dtype=torch.float64)
    for rank in range(SIZE):
        start = sum(splits[:rank])
        expected[start : start + splits[rank]] = rank + 1
    with together():
        assert not received.requires_grad
        assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("grouped", [False, True], ids=["single", "grouped"])
def test_reducescatter_gathers_gradients(op, grouped):
    x = leaf(SIZE + 1, 2)
    own = 2 if RANK == 0 else 1
    w = weights(own, 2)
    factors = {"prescale_factor": 2.0, "postscale_factor": 4.0}
    if grouped:
        y = hvd.grouped_reducescatter([x], op=op, **factors)[0]
    else:
        y = hvd.reducescatter(x, op=op, **factors)
    (y * w).sum().backward()
    expected = torch.cat(gather(w)) * 8.0 * (SIZE if op == hvd.Sum else 1)
    with together():
        torch.testing.assert_close(x.grad, expected)


def test_gradient_of_a_gradient():
    x = leaf(3)
    y = hvd.allreduce(x, op=hvd.Sum)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    with together():
        torch.testing.assert_close(first, 3 * SIZE * y**2)
        torch.testing.assert_close(second, 6 * SIZE * SIZE * y.detach() * 1.0)

"""`lazy_bucket_allocation`: buckets have memory while gradients are in them, and the same means."""

import ctypes
import mmap

import pytest
import torch
from models import loss_of, mlp
from replicas import RANK, together
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch_versions import for_torch

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi

BYTES = 4 << 20
TRANSPORTS = ["auto", "exchange", "mpi"]

libc = ctypes.CDLL(None, use_errno=True)


def resident(tensor: torch.Tensor) -> float:
    """Return which part of a tensor's whole pages is in memory."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    size = ctypes.c_size_t(pages * mmap.PAGESIZE)
    assert libc.mincore(ctypes.c_void_p(first), size, found) == 0
    return sum(flags & 1 for flags in found) / pages


def large_layer(**settings: object) -> DDP:
    return DDP(torch.nn.Linear(1024, BYTES // 4096, bias=False), **settings)


def backward(model: torch.nn.Module) -> None:
    torch.manual_seed(RANK)
    model(torch.randn(3, 1024)).square().sum().backward()


def loss(model: torch.nn.Module, batch: int) -> torch.Tensor:
    torch.manual_seed(batch + 100 * RANK)
    return loss_of(model, torch.randn(4, 6, dtype=torch.float64))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_comes_and_goes(transport):
    model = large_layer(lazy_bucket_allocation=True, transport=transport)
    found = []
    for _ in range(3):
        model.zero_grad()
        found.append(resident(model.reducer.buckets[0].gradients))
        backward(model)
        found.append(resident(model.reducer.buckets[0].gradients))
    with together():
        assert max(found) == 0
        assert model.module.weight.grad.abs().sum() > 0


def test_without_it_memory_stays():
    model = large_layer()
    backward(model)
    with together():
        assert resident(model.reducer.buckets[0].gradients) == 1


@pytest.mark.parametrize("held", ["gradient", "part", "storage", "nothing"])
def test_views_keep_it_while_somebody_has_one(held):
    model = large_layer(lazy_bucket_allocation=True, gradient_as_bucket_view=True)
    backward(model)
    backward(model)
    gradient = model.module.weight.grad
    before = gradient.clone()
    keep = {
        "gradient": gradient,
        "part": gradient[1:3],
        "storage": gradient.detach(),
        "nothing": None,
    }[held]
    kept = None if keep is None else keep.clone()
    del gradient
    with together():
        assert resident(model.reducer.buckets[0].gradients) == 1
        assert before.abs().sum() > 0
    model.zero_grad()
    output = model(torch.ones(1, 1024))
    found = resident(model.reducer.buckets[0].gradients)
    with together():
        assert found == (0 if keep is None else 1)
        if keep is not None:
            assert torch.equal(keep, kept)
    output.sum().backward()


def test_zeros_in_place_keep_it():
    model = large_layer(lazy_bucket_allocation=True, gradient_as_bucket_view=True)
    backward(model)
    model.zero_grad(set_to_none=False)
    backward(model)
    expected = large_layer(gradient_as_bucket_view=True)
    expected.module.load_state_dict(model.module.state_dict())
    backward(expected)
    with together():
        assert torch.equal(model.module.weight.grad, expected.module.weight.grad)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_same_steps_as_torchs_class(transport, views, gloo):
    """With accumulation, an unused parameter, and gradients that are kept or not."""
    settings = {"gradient_as_bucket_view": views, "find_unused_parameters": True}
    settings |= {"bucket_cap_mb": 0.01, "lazy_bucket_allocation": True}
    models = []
    for make, more in ((DDP, {"transport": transport}), (TorchDDP, {"process_group": gloo})):
        torch.manual_seed(3)
        net = mlp(6, 40, 1)
        net.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
        given = settings if make is DDP else for_torch(settings)
        models.append(make(net, **given, **more))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            with model.no_sync():
                loss(model, step).backward()
            loss(model, step + 10).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    ours, theirs = (list(model.module.parameters()) for model in models)
    with together():
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


def test_compressed_gradients():
    from mpiddp import compression

    model = large_layer(lazy_bucket_allocation=True)
    model.register_comm_hook(None, compression.bf16)
    backward(model)
    backward(model)
    with together():
        assert resident(model.reducer.buckets[0].gradients) == 0
        assert model.module.weight.grad.abs().sum() > 0

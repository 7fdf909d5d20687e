"""Apex's DistributedDataParallel, Reducer and SyncBatchNorm, as mpiddp.apex has them."""

import copy
from typing import Any

import pytest
import torch
from replicas import RANK, SIZE, assert_close, gather, together
from torch import Tensor, nn

import mpiddp
from mpiddp import apex

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 5, dtype=dtype), nn.Tanh(), nn.Linear(5, 2, dtype=dtype))


def batch(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)).to(dtype)


def mean_gradients(model: nn.Module, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return the mean over the ranks' batches, from one process."""
    alone = copy.deepcopy(model)
    for rank in range(SIZE):
        (alone(batch(rank, dtype)).square().sum() / SIZE).backward()
    return [parameter.grad for parameter in alone.parameters() if parameter.grad is not None]


def compare(model: nn.Module, expected: list[Tensor], factor: float = 1) -> None:
    with together():
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert_close(parameter.grad, gradient * factor, "gradient", 8)


@pytest.mark.essential(keep=3)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize(
    ("arguments", "factor"),
    [
        ({}, 1),
        ({"delay_allreduce": True}, 1),
        ({"message_size": 12, "num_allreduce_streams": 2, "prof": True}, 1),
        ({"gradient_average": False}, SIZE),
        ({"gradient_predivide_factor": 4.0}, 1),
        ({"gradient_predivide_factor": 4.0, "gradient_average": False}, SIZE / 4),
    ],
    # Ids must not depend on the number of ranks.
    ids=["default", "delayed", "small", "sum", "divided", "divided-sum"],
)
def test_gradients(arguments: dict[str, Any], factor: float) -> None:
    model = make_model()
    expected = mean_gradients(model)
    wrapped = apex.DistributedDataParallel(model, **arguments)
    assert isinstance(wrapped, mpiddp.DistributedDataParallel)
    for _ in range(3):
        model.zero_grad()
        wrapped(batch(RANK)).square().sum().backward()
        compare(model, expected, factor)


@pytest.mark.parametrize(
    ("arguments", "buckets"), [({"delay_allreduce": True}, 1), ({"message_size": 1}, 4)]
)
def test_sizes_of_buckets(arguments: dict[str, Any], buckets: int) -> None:
    wrapped = apex.DistributedDataParallel(make_model(), **arguments)
    for _ in range(2):
        wrapped(batch(RANK)).sum().backward()
    assert len(wrapped.reducer.buckets) == buckets


def test_gradients_of_16_bits_are_added_in_float32() -> None:
    """Here every rank's gradient fits 16 bits, and so does the mean, but not the sum."""
    model = nn.Linear(1, 1, bias=False).half()
    wrapped = apex.DistributedDataParallel(model, allreduce_always_fp32=True)
    wrapped(torch.full((1, 1), 60000.0).half()).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float16
    assert model.weight.grad.item() == torch.tensor(60000.0).half().item()


def test_parameters_that_nobody_uses_and_buffers() -> None:
    model = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2), nn.BatchNorm1d(2)])
    wrapped = apex.DistributedDataParallel(model)
    wrapped.forward = lambda input: model[0](input)
    for _ in range(2):
        mpiddp.DistributedDataParallel.__call__(wrapped, batch(RANK, torch.float32)).sum()
    assert model[1].weight.grad is None
    assert not wrapped.will_sync_module_buffers()


def test_accumulation() -> None:
    model = make_model()
    expected = mean_gradients(model)
    wrapped = apex.DistributedDataParallel(model)
    wrapped.disable_allreduce()
    wrapped(batch(RANK)).square().sum().backward()
    own = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    alone = copy.deepcopy(make_model())
    alone(batch(RANK)).square().sum().backward()
    compare(alone, own)
    wrapped.enable_allreduce()
    wrapped(batch(RANK)).square().sum().backward()
    compare(model, expected, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"shared_param": False}, "shared_param is not supported"),
        ({"retain_allreduce_buffers": True}, "read .grad"),
        ({"allreduce_communicators": []}, "makes its own"),
        ({"gradient_average_split_factor": 2.0}, "use gradient_predivide_factor"),
        ({"delay_allreduce": True, "num_allreduce_streams": 2}, "leaves one moment"),
        ({"delay_allreduce": True, "allreduce_trigger_params": []}, "leaves one moment"),
        ({"message_size": -1}, "must not be negative"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        apex.DistributedDataParallel(make_model(), **arguments)


@pytest.mark.essential
def test_reducer() -> None:
    torch.manual_seed(RANK)
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2).double(), nn.Linear(1, 1)])
    reducer = apex.Reducer(model)
    assert len({str(state) for state in gather(model.state_dict())}) == 1
    for layer in (model[0], model[1]):
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, RANK + 1.0)
    reducer.reduce()
    for parameter in [*model[0].parameters(), *model[1].parameters()]:
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, (SIZE + 1) / 2))
    assert model[2].weight.grad is None

    tensors = [torch.full((2,), float(RANK)), [torch.full((3,), RANK * 2.0)]]
    apex.Reducer(tensors).reduce()
    assert tensors[0].tolist() == [(SIZE - 1) / 2] * 2


@pytest.mark.mpi(min_size=2)
def test_reducer_finds_different_gradients() -> None:
    model = nn.Linear(3, 2)
    reducer = apex.Reducer(model)
    model.weight.grad = torch.ones_like(model.weight)
    if RANK == 0:
        model.bias.grad = torch.ones_like(model.bias)
    said = f"rank {RANK} reduces .* but other ranks reduce 1 to 2 gradients with 6 to 8 elements"
    with together(), pytest.raises(RuntimeError, match=said):
        reducer.reduce()


@pytest.mark.essential
def test_sync_batch_norm() -> None:
    whole = torch.randn(3 * SIZE, 4, 5, generator=torch.Generator().manual_seed(1)).double()
    own = whole[RANK::SIZE]
    alone = nn.BatchNorm1d(4).double()
    model = nn.Sequential(nn.BatchNorm1d(4).double())
    converted = apex.convert_syncbn_model(model)[0]
    assert type(converted) is apex.SyncBatchNorm
    expected = alone(whole)[RANK::SIZE]
    with together():
        assert_close(converted(own), expected, "output", 8)
        assert_close(converted.running_var, alone.running_var, "variance", 8)

    last = apex.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(4).double()), channel_last=True)
    output = last[0](own.movedim(1, 2))
    fused = apex.SyncBatchNorm(4, fuse_relu=True).double()
    sum_of_both = fused(own, own)
    with together():
        assert_close(output.movedim(2, 1), expected, "output", 8)
        assert_close(sum_of_both, torch.relu(expected + own), "output", 8)


def test_groups_of_layers() -> None:
    assert apex.create_syncbn_process_group(0) is None
    group = apex.create_syncbn_process_group(1)
    assert group is not None
    assert torch.distributed.get_process_group_ranks(group) == [RANK]
    with pytest.raises(ValueError, match=f"groups of {SIZE + 1} do not divide {SIZE} ranks"):
        apex.create_syncbn_process_group(SIZE + 1)

"""Lesser arguments and private methods do on our class what they do on torch's over Gloo."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    all_bits,
    assert_close,
    assert_gradients_close,
    assert_replicated,
    gradients_of,
    together,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP

pytestmark = [pytest.mark.mpi, pytest.mark.essential]
several = pytest.mark.mpi(min_size=2)

BUILT_IN = {
    "all-reduce": dist.BuiltinCommHookType.ALLREDUCE,
    "float16": dist.BuiltinCommHookType.FP16_COMPRESS,
}


def wrap_both(
    module: nn.Module, group: dist.ProcessGroup, **options: object
) -> tuple[DDP, TorchDDP]:
    return (
        DDP(copy.deepcopy(module), **options),
        TorchDDP(copy.deepcopy(module), process_group=group, **options),
    )


def step_both(pair: tuple[DDP, TorchDDP], factor: float = 2) -> None:
    """Take one step of both with the same input and compare the gradients."""
    parameter = next(pair[0].parameters())
    x = torch.randn(2, parameter.shape[1], dtype=parameter.dtype) + RANK
    for model in pair:
        model.zero_grad()
        loss_of(model, x).backward()
    with together():
        assert_gradients_close(gradients_of(pair[0]), gradients_of(pair[1]), factor)


def test_state_is_not_synchronised_at_construction(gloo):
    """Without init_sync each rank keeps its parameters; buffers come with the first forward."""
    torch.manual_seed(RANK)
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        module[1].running_mean.fill_(RANK)
    before = all_bits(module.state_dict().items())
    pair = wrap_both(module, gloo, init_sync=False)
    with together():
        for model in pair:
            assert all_bits(model.module.state_dict().items()) == before
    for _ in range(2):
        step_both(pair)
    with together():
        for name, buffer in pair[0].module.named_buffers():
            assert_close(buffer, pair[1].module.get_buffer(name), name)


@pytest.mark.parametrize("sizes", [[0.001, 0.002, 0.004], [0.0005], (0.003, 0.001)])
def test_list_of_bucket_sizes(sizes, gloo):
    """The same buckets as torch's once they are rebuilt, when the order is known."""
    module = mlp(4, 30, 8, 50, 3, 20, 20, 2)
    pair = wrap_both(module, gloo, bucket_cap_mb_list=sizes)
    for _ in range(3):
        step_both(pair)
    with together():
        ours, theirs = (model._get_ddp_logging_data() for model in pair)
        assert ours["rebuilt_bucket_sizes"] == theirs["rebuilt_bucket_sizes"]
        assert pair[0].bucket_bytes_cap_list == pair[1].bucket_bytes_cap_list


def test_ignored_parameters_and_buffers(gloo):
    """They are neither broadcast nor averaged."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        module[2].bias.fill_(RANK)
        module[1].running_mean.fill_(RANK)
    ignored = ["2.bias", "1.running_mean"]
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ignored)
    pair = wrap_both(module, gloo)
    for _ in range(3):
        step_both(pair)
    with together():
        for name, own in pair[0].module.state_dict().items():
            assert_close(own.double(), pair[1].module.state_dict()[name].double(), name)
        assert pair[0].parameters_to_ignore == pair[1].parameters_to_ignore == set(ignored)
        assert pair[0].module[2].bias.tolist() == [RANK] * 2


class _KeepsOutput(nn.Module):
    """Remembers where its output is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp(3, 2)
        self.address = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.address = y.data_ptr()
        return y


@pytest.mark.parametrize("clone", [None, True, False])
def test_sink_clones_outputs(clone, gloo):
    """_set_ddp_sink_clone: whether forward returns the module's own outputs or copies."""
    pair = wrap_both(_KeepsOutput(), gloo, find_unused_parameters=True)
    for _ in range(2):
        same = []
        for model in pair:
            if clone is not None:
                model._set_ddp_sink_clone(clone)
            output = model(torch.ones(2, 3, dtype=torch.float64))
            same.append(output.data_ptr() == model.module.address)
            output.sum().backward()
        with together():
            assert same == [clone is False] * 2
            assert_gradients_close(gradients_of(pair[0]), gradients_of(pair[1]))


def test_sparse_metadata(gloo):
    """Torch's class on Gloo only takes it: its next backward with a sparse gradient fails."""
    ids = {"module.weight": torch.tensor([1, 2])}
    pair = wrap_both(nn.Linear(3, 2), gloo)
    for model in pair:
        with pytest.raises(TypeError):
            model._set_sparse_metadata(3)
        model._set_sparse_metadata(ids)
    step_both(pair)
    sparse = DDP(nn.Embedding(4, 2, sparse=True))
    sparse._set_sparse_metadata(ids)
    sparse(torch.tensor([1, 2])).sum().backward()
    with together():
        gradient = sparse.module.weight.grad.to_dense()
        assert gradient.sum(1).tolist() == [0, 2, 2, 0]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_hook(name, views, gloo):
    pair = wrap_both(mlp(3, 4, 2, dtype=torch.float32), gloo, gradient_as_bucket_view=views)
    for model in pair:
        model._register_builtin_comm_hook(BUILT_IN[name])
    for _ in range(3):
        step_both(pair, 2 if name == "all-reduce" else 300)
    with together():
        hooks = [model._get_ddp_logging_data()["comm_hook"] for model in pair]
        assert hooks[0] == hooks[1]
        for model in pair:
            with pytest.raises(RuntimeError):
                model._register_builtin_comm_hook(BUILT_IN[name])


@several
@pytest.mark.parametrize(
    "copier",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_copies_are_for_the_default_group_only(copier: Callable[[Any], Any], gloo):
    group = dist.new_group(list(range(SIZE)))
    for model in (DDP(mlp(3, 2), process_group=group), TorchDDP(mlp(3, 2), process_group=gloo)):
        with together(), pytest.raises(RuntimeError, match="default process group"):
            copier(model)
    dist.destroy_process_group(group)


@several
def test_update_process_group(views, gloo):
    """Without the last rank, then with it again.

    In the first step with a rank that was outside, torch's class mixes up buckets: that rank has
    not rebuilt its own.
    """
    fewer = dist.new_group(list(range(SIZE - 1)))
    fewer_gloo = dist.new_group(list(range(SIZE - 1)), backend="gloo")
    pair = wrap_both(mlp(3, 4, 2), gloo, gradient_as_bucket_view=views)
    step_both(pair)
    for groups in ((fewer, fewer_gloo), (dist.group.WORLD, gloo)):
        inside = groups[0] is dist.group.WORLD or RANK < SIZE - 1
        for model, group in zip(pair, groups, strict=True):
            model._update_process_group(group)
        for step in range(3):
            x = torch.full((2, 3), RANK + step + 1.0, dtype=torch.float64)
            for model in pair if inside else ():
                model.zero_grad()
                loss_of(model, x).backward()
            with together():
                if inside:
                    if step or groups[0] is fewer:
                        assert_gradients_close(gradients_of(pair[0]), gradients_of(pair[1]))
                    sizes = [model.process_group.size() for model in pair]
                    assert sizes[0] == sizes[1] == groups[0].size()
            if groups[0] is dist.group.WORLD:
                assert_replicated(pair[0])

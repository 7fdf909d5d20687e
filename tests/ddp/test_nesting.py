"""The wrapper as a module among others: nested, saved whole, switched, fed by a sampler."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from models import loss_of, mlp
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
from torch.utils.data import DistributedSampler
from torch_versions import HAS_FORWARD_SYNC_BUFFERS, for_torch

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi


def test_inside_of_other_modules(gloo):
    """Part of a larger model: the rest stays the rank's own, and names and modes are torch's."""

    def build(wrap, options):
        return nn.ModuleDict(
            {"body": wrap(mlp(3, 4), **options), "head": nn.Linear(4, 2, dtype=torch.float64)}
        )

    torch.manual_seed(RANK)
    ours = build(DDP, {})
    theirs = build(TorchDDP, {"process_group": gloo})
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, dtype=torch.float64)
    for _ in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            model["head"](model["body"](x)).square().mean().backward()
        with together():
            assert list(ours.state_dict()) == list(theirs.state_dict())
            assert "body.module.0.weight" in ours.state_dict()
            assert_gradients_close(gradients_of(ours), gradients_of(theirs))
        assert_replicated(ours["body"])
    ours.eval()
    with together():
        assert not ours["body"].training
        assert not ours["body"].module[0].training


def nested(wrap, layers, inner, **options):
    return wrap(nn.Sequential(wrap(layers[0], **inner, **options), layers[1]), **options)


@pytest.mark.parametrize("idle", [False, True], ids=["all used", "find unused"])
def test_wrapper_inside_of_a_wrapper(idle, gloo):
    """The inner one's parameters belong to both, as in torch's class."""
    layers = [mlp(3, 4), mlp(4, 2)]
    options = {"find_unused_parameters": idle}
    ours = nested(DDP, copy.deepcopy(layers), {}, **options)
    theirs = nested(TorchDDP, layers, {}, process_group=gloo, **options)
    for _ in range(3):
        x = torch.randn(2, 3, dtype=torch.float64) + RANK
        for model in (ours, theirs):
            model.zero_grad()
            loss_of(model, x).backward()
        with together():
            assert_gradients_close(gradients_of(ours), gradients_of(theirs))
            assert list(ours.state_dict()) == list(theirs.state_dict())
        assert_replicated(ours)


@pytest.mark.parametrize("which", ["inner", "both"])
def test_wrapper_inside_of_a_wrapper_with_views_is_refused(which, gloo):
    """A gradient cannot be a view into two buckets; torch's class notices if both use views."""
    views = {"gradient_as_bucket_view": True}
    inner, options = (views, {}) if which == "inner" else ({}, views)
    models = [nested(DDP, [mlp(3, 4), mlp(4, 2)], inner, **options)]
    if which == "both":
        layers = [mlp(3, 4), mlp(4, 2)]
        models.append(nested(TorchDDP, layers, inner, process_group=gloo, **options))
    for model in models:
        x = torch.randn(2, 3, dtype=torch.float64)
        loss = loss_of(model, x)
        with together(), pytest.raises(RuntimeError, match="gradient_as_bucket_view") as caught:
            loss.backward()
        if isinstance(model, DDP):
            with together():
                assert "weight' of shape (4, 3) and 1 more" in str(caught.value)


def test_two_wrappers_of_one_module_in_turn(views):
    """Views into the buckets of the one that was used last."""
    module = mlp(3, 4, 2)
    pair = [DDP(module, gradient_as_bucket_view=views) for _ in range(2)]
    for step in range(4):
        batch = torch.randn(2 * SIZE, 3, dtype=torch.float64)
        alone = copy.deepcopy(module)
        alone.zero_grad()
        loss_of(alone, batch).backward()
        pair[step % 2].zero_grad(set_to_none=step != 2)
        loss_of(pair[step % 2], share(batch)).backward()
        with together():
            assert_gradients_close(gradients_of(module), gradients_of(alone))


def test_modes_are_those_of_the_module(gloo):
    for wrap, options in ((DDP, {}), (TorchDDP, {"process_group": gloo})):
        wrapped = wrap(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), **options)
        with together():
            assert wrapped.eval() is wrapped
            assert not wrapped.module[1].training
            assert wrapped(torch.ones(1, 2)).grad_fn is not None
            assert wrapped.train() is wrapped
            assert wrapped.module[1].training
            wrapped.module.eval()
            assert wrapped.training


@pytest.mark.essential(keep=1)
def test_the_whole_wrapper_saved_and_loaded(views):
    """torch.save of the object, not of its state; loading it is collective, as in torch."""
    wrapped = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views, find_unused_parameters=True)
    loss_of(wrapped, torch.ones(2, 3, dtype=torch.float64)).backward()
    file = io.BytesIO()
    torch.save(wrapped, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.randn(2, 3, dtype=torch.float64) + RANK
    for model in (wrapped, loaded):
        model.zero_grad()
        loss_of(model, x).backward()
    with together():
        assert type(loaded) is DDP
        assert loaded.find_unused_parameters
        assert_gradients_close(gradients_of(loaded), gradients_of(wrapped))


def test_distributed_sampler():
    """Torch's sampler takes rank and world from the process group; every index comes once."""
    data = list(range(4 * SIZE + 1))
    for options in ({"drop_last": True}, {"shuffle": False}):
        sampler: DistributedSampler[int] = DistributedSampler(data, **options)
        sampler.set_epoch(3)
        indices = gather(list(sampler))
        with together():
            assert (sampler.rank, sampler.num_replicas) == (RANK, SIZE)
            everyone = [index for own in indices for index in own]
            assert len({len(own) for own in indices}) == 1
            if "drop_last" in options:
                assert len(set(everyone)) == len(everyone) == len(data) // SIZE * SIZE
            else:
                assert set(everyone) == set(data)


@pytest.mark.mpi(min_size=3)
def test_wrappers_of_two_groups_at_a_time():
    """Each rank pair averages among itself, in groups that dist.new_group made."""
    groups = [dist.new_group([0, 1]), dist.new_group(list(range(2, SIZE)))]
    mine = 0 if RANK < 2 else 1
    members = [0, 1] if mine == 0 else list(range(2, SIZE))
    model = nn.Linear(1, 1, bias=False)
    wrapped = DDP(model, process_group=groups[mine])
    for _ in range(3):
        wrapped.zero_grad()
        x: Tensor = torch.full((1, 1), float(RANK))
        wrapped(x).sum().backward()
        with together():
            assert model.weight.grad.item() == sum(members) / len(members)
    dist.barrier()


ATTRIBUTES = (
    *("device_ids", "output_device", "device", "device_type", "dim", "is_multi_device_module"),
    *("broadcast_buffers", "find_unused_parameters", "static_graph"),
    *("gradient_as_bucket_view", "require_backward_grad_sync", "require_forward_param_sync"),
    *("bucket_bytes_cap", "bucket_bytes_cap_list", "parameters_to_ignore", "mixed_precision"),
    *("_distributed_rank", "training"),
    *(("forward_sync_buffers",) if HAS_FORWARD_SYNC_BUFFERS else ()),
)


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 3}, {"forward_sync_buffers": False}])
def test_attributes(options, gloo):
    """What scripts and libraries read from a wrapper, before and after steps with and without."""
    pair = [
        wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), **taken)
        for wrap, taken in (
            (DDP, {"transport": "shared", **options}),
            (TorchDDP, {"process_group": gloo, **for_torch(options)}),
        )
    ]

    def seen(model):
        values = {name: getattr(model, name) for name in ATTRIBUTES}
        return values | {"will sync": model.will_sync_module_buffers()}

    for step in range(3):
        for model in pair:
            if step == 1:
                with model.no_sync():
                    model(torch.ones(2, 2)).sum().backward()
            else:
                model(torch.ones(2, 2)).sum().backward()
        with together():
            assert seen(pair[0]) == seen(pair[1])


@pytest.mark.essential
def test_hooks_removed(gloo):
    """Without them the gradients stay the rank's own."""
    for model in (DDP(mlp(3, 2)), TorchDDP(mlp(3, 2), process_group=gloo)):
        alone = copy.deepcopy(model.module)
        model._remove_autograd_hooks()
        x = torch.full((2, 3), float(RANK), dtype=torch.float64)
        loss_of(model, x).backward()
        loss_of(alone, x).backward()
        with together():
            assert_gradients_close(gradients_of(model), gradients_of(alone))

"""A wrapper that is dropped frees its hooks, its memory and its communicator."""

import contextlib
import copy
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from models import loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    assert_gradients_close,
    assert_replicated,
    gradients_of,
    share,
    together,
)

from mpiddp import DistributedDataParallel as DDP
from mpiddp.transports.choice import requested_transport

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """Let gc.collect() skip torch's own many objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def trained(views: bool, steps: int = 2, **options: object) -> DDP:
    wrapped = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views, **options)
    for _ in range(steps):
        wrapped.zero_grad()
        loss_of(wrapped, torch.full((2, 3), RANK + 1.0, dtype=torch.float64)).backward()
    return wrapped


def channels() -> int:
    """Return how many channels of the usual kind the world's group has opened."""
    return dist.group.WORLD.channel_pool._kinds.count((requested_transport(None), None))


class FailsAtLast(DDP):
    """On one rank its construction fails when all channels are open."""

    def _ddp_init_helper(self, *arguments):
        super()._ddp_init_helper(*arguments)
        if RANK == SIZE - 1:
            raise ValueError("broken on purpose")


@pytest.mark.essential(keep=1)
def test_construction_that_fails(views):
    """It leaves neither hooks nor memory, and its channel is lent again."""
    trained(views)
    gc.collect()
    before = channels()
    for _ in range(3):
        module, wrapped = mlp(3, 4, 2), None
        with contextlib.suppress(ValueError):
            wrapped = FailsAtLast(module, gradient_as_bucket_view=views)
        with together():
            assert (wrapped is None) == (RANK == SIZE - 1)
        if wrapped is None:
            loss_of(module, torch.ones(2, 3, dtype=torch.float64)).backward()  # on this rank alone
        kept = weakref.ref(module), weakref.ref(module[0].weight)
        del module, wrapped
        gc.collect()
        with together():
            assert [each() for each in kept] == [None, None]
    wrapped = trained(views)
    assert_replicated(wrapped.module)
    with together():
        assert channels() == before


@pytest.mark.essential(keep=3)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_everything_is_freed(steps, views):
    wrapped = trained(views, steps)
    kept = {
        "wrapper": weakref.ref(wrapped),
        "module": weakref.ref(wrapped.module),
        "parameter": weakref.ref(wrapped.module[0].weight),
        "reducer": weakref.ref(wrapped.reducer),
        "buffer": weakref.ref(wrapped.reducer.buckets[0].buffer),
        "logger": weakref.ref(wrapped.logger),
    }
    del wrapped
    gc.collect()
    with together():
        assert [name for name, reference in kept.items() if reference() is not None] == []


def test_module_outlives_its_wrapper(views):
    """The bare module goes on alone: no hook of ours is left on it."""
    wrapped = trained(views)
    model = wrapped.module
    before = {name: gradient.clone() for name, gradient in gradients_of(model).items()}
    del wrapped
    gc.collect()
    with together():
        for parameter in model.parameters():
            assert not parameter._post_accumulate_grad_hooks
            assert not parameter._backward_hooks
        # With views the gradients keep the buckets' memory alive.
        assert_gradients_close(gradients_of(model), before)
        if RANK == 0:
            alone = copy.deepcopy(model)
            model.zero_grad()
            batch = torch.ones(2, 3, dtype=torch.float64)
            loss_of(alone, batch).backward()
            loss_of(model, batch).backward()
            assert_gradients_close(gradients_of(model), gradients_of(alone))


def test_wrapped_again(views):
    model = trained(views).module
    gc.collect()
    for views_now in (views, not views):
        wrapped = DDP(model, gradient_as_bucket_view=views_now)
        for _ in range(3):
            batch = torch.randn(2 * dist.get_world_size(), 3, dtype=torch.float64)
            alone = copy.deepcopy(model)
            loss_of(alone, batch).backward()
            wrapped.zero_grad()
            loss_of(wrapped, share(batch)).backward()
            with together():
                assert_gradients_close(gradients_of(wrapped), gradients_of(alone))
        del wrapped
        gc.collect()


@pytest.mark.thorough(keep=1)
def test_many_models_in_a_row(views):
    """Two hundred models, one after the other, share a few communicators."""
    gc.collect()
    before = channels()
    for count in range(200):
        wrapped = DDP(torch.nn.Linear(2, 1), gradient_as_bucket_view=views, init_sync=False)
        if count % 20 == 0:
            wrapped(torch.ones(1, 2)).sum().backward()
    del wrapped
    with together():
        # A wrapper is dropped only when its successor has been made.
        assert channels() <= before + 2


def test_models_that_die_at_different_times(views):
    """Garbage collection frees models when it likes, on each rank at another time."""
    gc.collect()
    gc.disable()
    try:
        before = channels()
        for count in range(8):
            wrapped = trained(views, 1)
            if count % SIZE != RANK:
                wrapped.itself = [wrapped]  # a reference cycle
            del wrapped
            if count % 4 == RANK:
                gc.collect()
        after = channels()
        gc.collect()
        survivor = trained(views)
    finally:
        gc.enable()
    assert_replicated(survivor)
    with together():
        assert before <= after <= before + 8
        assert channels() == after


def test_models_that_live_together_have_their_own_queues():
    gc.collect()
    before = channels()
    models = [trained(False, 1) for _ in range(before + 3)]
    with together():
        assert len({id(model.reducer.channel) for model in models}) == len(models)
    del models


def test_dropped_between_forward_and_backward(views):
    """The loss does not keep the wrapper: a backward after it is gone is local."""
    model = mlp(3, 2)
    loss = loss_of(DDP(model, gradient_as_bucket_view=views), torch.ones(2, 3).double())
    gc.collect()
    with together():
        if RANK == 0:
            loss.backward()
            assert model[0].weight.grad is not None

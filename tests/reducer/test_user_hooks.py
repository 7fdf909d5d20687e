"""Hooks of the user that change `.grad` during backward: what they leave is what is averaged."""

import copy

import pytest
import torch
from models import GivenGradients
from replicas import (
    RANK,
    SIZE,
    STEPS,
    assert_gradients_close,
    assert_replicated,
    gradients_of,
    mean_by_hook,
    together,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi

FACTOR = 3.0
NAMES = [f"p{number}" for number in range(6)]


def _in_place(parameter):
    parameter.grad.mul_(FACTOR)


def _replaced(parameter):
    parameter.grad = parameter.grad * FACTOR


def _through_data(parameter):
    parameter.grad.data.mul_(FACTOR)


CHANGES = {"in place": _in_place, "replaced": _replaced, "through data": _through_data}


def _module():
    """Several parameters, each in a bucket of its own with `OPTIONS`."""
    shapes = [(4,), (2, 3), (3, 2), (1000,), (5,), (1,)]
    return GivenGradients(**dict(zip(NAMES, map(torch.zeros, shapes), strict=True)))


# Each bucket is reduced while backward goes on.
OPTIONS = {"bucket_cap_mb": 1e-6}


def _coefficients(module, rank):
    return {
        name: torch.arange(1.0, 1 + parameter.numel()).view_as(parameter) * (rank + 1)
        for name, parameter in module.named_parameters()
    }


def _mean(module, factors):
    """Return what the gradients should be, with the factor of each rank."""
    own = [_coefficients(module, rank) for rank in range(SIZE)]
    return {
        name: sum(factors[rank] * own[rank][name] for rank in range(SIZE)) / SIZE for name in own[0]
    }


def _add_hooks(module, change):
    return [p.register_post_accumulate_grad_hook(change) for p in module.parameters()]


def _pair(gloo, **options):
    """Wrap two equal models by our class and by torch's."""
    module = _module()
    return (
        DDP(copy.deepcopy(module), **OPTIONS, **options),
        TorchDDP(copy.deepcopy(module), process_group=gloo, **OPTIONS, **options),
    )


def _step(model, expected, before_backward=None):
    model.zero_grad()
    loss = model(_coefficients(model.module, RANK))
    if before_backward is not None:
        before_backward()
    loss.backward()
    with together():
        assert_gradients_close(gradients_of(model), expected)
    assert_replicated(model)


@pytest.mark.thorough(keep=6)
@pytest.mark.essential(keep=3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("option", ["plain", "find_unused_parameters", "static_graph"])
def test_hook_added_after_wrapping(change, option, views, gloo):
    options = {"gradient_as_bucket_view": views}
    if option != "plain":
        options[option] = True
    for model in _pair(gloo, **options):
        _add_hooks(model.module, CHANGES[change])
        for _ in range(STEPS):
            _step(model, _mean(model.module, [FACTOR] * SIZE))


@pytest.mark.parametrize("change", CHANGES)
def test_hook_of_one_rank(change, views, gloo):
    for model in _pair(gloo, gradient_as_bucket_view=views):
        if RANK == SIZE - 1:
            _add_hooks(model.module, CHANGES[change])
        for _ in range(STEPS):
            _step(model, _mean(model.module, [1] * (SIZE - 1) + [FACTOR]))


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before forward", "before backward"])
def test_hooks_that_come_and_go(change, when, views, gloo):
    """Added and removed in each iteration, before forward or between it and backward."""
    for model in _pair(gloo, gradient_as_bucket_view=views):
        handles = []

        def add(module=model.module, handles=handles):
            handles += _add_hooks(module, CHANGES[change])

        for step in range(2 * STEPS):
            while handles:
                handles.pop().remove()
            if step % 2:
                _step(model, _mean(model.module, [1] * SIZE))
            elif when == "before forward":
                add()
                _step(model, _mean(model.module, [FACTOR] * SIZE))
            else:
                _step(model, _mean(model.module, [FACTOR] * SIZE), add)


def test_hook_added_during_backward(views, gloo):
    """By a hook on the gradient, before it is accumulated, and for another parameter."""
    for model in _pair(gloo, gradient_as_bucket_view=views):
        handles = []

        def add(gradient, module=model.module, handles=handles):
            if not handles:
                handles += _add_hooks(module, _in_place)

        for parameter in model.module.parameters():
            parameter.register_hook(add)
        for _ in range(STEPS):
            _step(model, _mean(model.module, [FACTOR] * SIZE))
            while handles:
                handles.pop().remove()


def test_several_hooks_in_their_order(views, gloo):
    """Before and after wrapping: all run, in the order in which they were added."""
    seen = []
    for wrap, group in ((DDP, None), (TorchDDP, gloo)):
        module = _module()
        own = []
        _add_hooks(module, lambda p, own=own: (own.append("before"), _in_place(p))[0])
        model = wrap(module, process_group=group, gradient_as_bucket_view=views, **OPTIONS)
        for name in ("first", "second"):
            _add_hooks(module, lambda p, name=name, own=own: (own.append(name), _replaced(p))[0])
        for _ in range(STEPS):
            _step(model, _mean(module, [FACTOR**3] * SIZE))
        seen.append(own)
    with together():
        assert seen[0] == seen[1]
        assert seen[0] == ["before", "first", "second"] * len(NAMES) * STEPS


def test_accumulation(views, gloo):
    """A hook changes what was accumulated under no_sync, each time."""
    for model in _pair(gloo, gradient_as_bucket_view=views):
        _add_hooks(model.module, _in_place)
        for _ in range(STEPS):
            model.zero_grad()
            for _ in range(2):
                with model.no_sync():
                    model(_coefficients(model.module, RANK)).backward()
            model(_coefficients(model.module, RANK)).backward()
            expected = _mean(model.module, [FACTOR**3 + FACTOR**2 + FACTOR] * SIZE)
            with together():
                assert_gradients_close(gradients_of(model), expected)
            assert_replicated(model)


@pytest.mark.parametrize("unused", [True, False], ids=["find_unused_parameters", "plain"])
def test_gradient_taken_away(unused, views, gloo):
    """A rank whose hook leaves no gradient counts as zero."""
    for model in _pair(gloo, gradient_as_bucket_view=views, find_unused_parameters=unused):
        if RANK == 0:
            _add_hooks(model.module, lambda parameter: setattr(parameter, "grad", None))
        for _ in range(STEPS):
            _step(model, _mean(model.module, [0] + [1] * (SIZE - 1)))


def test_communication_hook(views):
    model = DDP(_module(), gradient_as_bucket_view=views, **OPTIONS)
    model.register_comm_hook(None, mean_by_hook)
    _add_hooks(model.module, _in_place)
    for _ in range(STEPS):
        _step(model, _mean(model.module, [FACTOR] * SIZE))


def test_sparse_gradients(gloo):
    for wrap, group in ((DDP, None), (TorchDDP, gloo)):
        module = nn.Embedding(4, 2, sparse=True)
        nn.init.ones_(module.weight)
        model = wrap(module, process_group=group)
        module.weight.register_post_accumulate_grad_hook(_replaced)
        for _ in range(STEPS):
            model.zero_grad()
            model(torch.tensor([RANK, 3])).sum().backward()
            expected = torch.zeros(4, 2)
            for rank in range(SIZE):
                expected[[rank, 3]] += FACTOR / SIZE
            with together():
                assert torch.allclose(module.weight.grad.to_dense(), expected)


def test_parameters_of_two_wrappers(views):
    """Each wrapper averages what the hooks leave, whichever was made first."""
    module = _module()
    first = DDP(module, gradient_as_bucket_view=views, **OPTIONS)
    _add_hooks(module, _in_place)
    second = DDP(module, gradient_as_bucket_view=views, **OPTIONS)
    _add_hooks(module, _in_place)
    for _ in range(STEPS):
        for model in (first, second):
            _step(model, _mean(module, [FACTOR**2] * SIZE))


@pytest.mark.essential(keep=1)
def test_reentrant_checkpoint(views):
    """Parameters whose hooks run in a backward nested in another one."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.given = _module()

        def forward(self, coefficients, one):
            halves = [dict(list(coefficients.items())[part::2]) for part in range(2)]
            return sum(
                torch.utils.checkpoint.checkpoint(
                    lambda one, half=half: self.given(half) * one, one, use_reentrant=True
                )
                for half in halves
            )

    model = DDP(Checkpointed(), gradient_as_bucket_view=views, **OPTIONS)
    given = model.module.given
    handles = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = model(_coefficients(given, RANK), torch.ones((), requires_grad=True))
        handles += _add_hooks(given, _in_place)
        loss.backward()
        with together():
            assert_gradients_close(gradients_of(given), _mean(given, [FACTOR] * SIZE))
        assert_replicated(model)
        while handles:
            handles.pop().remove()


def test_hooks_that_raise(views):
    """A user's error reaches the user, and nothing is averaged twice or lost after it."""
    model = DDP(_module(), gradient_as_bucket_view=views, **OPTIONS)

    def fail(parameter):
        raise ValueError("no")

    handle = model.module.p5.register_post_accumulate_grad_hook(fail)
    with together(), pytest.raises(ValueError, match="no"):
        model(_coefficients(model.module, RANK)).backward()
    handle.remove()
    model = DDP(model.module, gradient_as_bucket_view=views, **OPTIONS)
    _step(model, _mean(model.module, [1] * SIZE))


@pytest.mark.essential
def test_hooks_go_with_the_wrapper():
    module = _module()
    model = DDP(module)
    _add_hooks(module, _in_place)
    _step(model, _mean(module, [FACTOR] * SIZE))
    del model
    with together():
        assert all(len(p._post_accumulate_grad_hooks) == 1 for p in module.parameters())

"""Gradients whose data, shape or memory the user replaces: still averaged, or refused by name."""

import copy
import gc
from collections.abc import Iterator

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
    lies_in_buckets,
    mean_by_hook,
    mean_of_ranks,
    share,
    together,
)
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp import compression
from mpiddp.torch_internals import tensors

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract"),
]


@pytest.fixture(params=[False, True], ids=["c", "python"])
def in_python(request: pytest.FixtureRequest) -> Iterator[bool]:
    tensors.stay_in_python(request.param)
    yield request.param
    tensors.stay_in_python(False)


def _each_gradient(change):
    def apply(module):
        for parameter in module.parameters():
            if parameter.grad is not None:
                change(parameter)

    return apply


def _new_data(parameter):
    parameter.grad.data = parameter.grad.clone()


def _other_strides(parameter):
    gradient = parameter.grad
    reordered = gradient.permute(*reversed(range(gradient.dim()))).contiguous()
    gradient.data = reordered.permute(*reversed(range(gradient.dim())))


def _set(parameter):
    other = parameter.grad.clone()
    parameter.grad.set_(other.untyped_storage(), 0, other.size(), other.stride())


def _shifted(parameter):
    """Let a gradient overlap its own place, and that of the next parameter."""
    gradient = parameter.grad
    memory = torch.empty(gradient.numel() + 1)
    parameter.grad = memory[1:].view(gradient.shape).copy_(gradient)
    parameter.grad.data = memory[:-1].view(gradient.shape).copy_(gradient)


CHANGES = {
    "new data": _each_gradient(_new_data),
    "other strides": _each_gradient(_other_strides),
    "set_": _each_gradient(_set),
    "shifted": _each_gradient(_shifted),
    "channels_last": lambda module: module.to(memory_format=torch.channels_last),
    "contiguous": lambda module: module.to(memory_format=torch.contiguous_format),
    "double and float": lambda module: module.double().float(),
    "share_memory": lambda module: module.share_memory(),
    "gradients shared": _each_gradient(lambda parameter: parameter.grad.share_memory_()),
}


class Images(nn.Module):
    """Convolutions, whose gradients may have two layouts, and parameters with only one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(2, 3)
        )
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, with_unused: bool = False) -> Tensor:
        y: Tensor = self.layers(x)
        return y * self.unused if with_unused else y


def _loss(model: nn.Module, batch: Tensor, with_unused: bool) -> Tensor:
    loss: Tensor = model(batch, with_unused).square().mean()
    return loss


OPTIONS = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 1e-6},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "no_sync": {},
    "fp16": {},
    "hook": {},
}


def _train(wrapped: DDP, change, *, accumulate: bool = False, unused: bool = False, rounding=0):
    """Take steps with a change after each; compare with one process that sees the same."""
    module = wrapped.module
    for step in range(2 * STEPS):
        batch = torch.randn(2 * SIZE, 3, 4, 4)
        with_unused = not unused or (step % 2 == 0 and step % 3 == 0)
        kept = {name: p.grad for name, p in module.named_parameters()}
        kept = {name: None if g is None else g.clone() for name, g in kept.items()}
        way = step % 3  # drop gradients, zero them in place, or add to them
        wrapped.zero_grad(set_to_none=way == 0) if way < 2 else None
        expected = mean_of_ranks(
            module,
            lambda model, rank, batch=batch, with_unused=with_unused: _loss(
                model, share(batch, rank), with_unused
            ),
        )
        times = 1
        if accumulate:
            times = 2
            with wrapped.no_sync():
                _loss(wrapped, share(batch), with_unused).backward()
            change(module)
        _loss(wrapped, share(batch), with_unused).backward()
        for name, gradient in expected.items():
            if gradient is not None:
                gradient.mul_(times)
            if way == 1 and gradient is None and kept[name] is not None:
                expected[name] = torch.zeros_like(kept[name])
            elif way == 2 and kept[name] is not None:
                expected[name] = kept[name] if gradient is None else gradient + kept[name]
        with together():
            assert_gradients_close(gradients_of(wrapped), expected, 5, rounding)
        assert_replicated(wrapped)
        change(module)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.05)


@pytest.mark.essential(keep=3)
@pytest.mark.thorough(keep=12)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("option", OPTIONS)
def test_changed_after_each_step(change, option, views):
    wrapped = DDP(Images(), gradient_as_bucket_view=views, **OPTIONS[option])
    if option == "fp16":
        wrapped.register_comm_hook(None, compression.fp16)
    elif option == "hook":
        wrapped.register_comm_hook(None, mean_by_hook)
    _train(
        wrapped,
        CHANGES[change],
        accumulate=option == "no_sync",
        unused=option == "find_unused_parameters",
        rounding=0.01 if option == "fp16" else 0,
    )


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_on_one_rank(change, views):
    """The layouts of the ranks differ from then on."""
    wrapped = DDP(Images(), gradient_as_bucket_view=views)
    _train(wrapped, lambda module: None)  # buckets are not laid out again afterwards
    _train(wrapped, CHANGES[change] if RANK == SIZE - 1 else lambda module: None)


@pytest.mark.skipif(SIZE == 1, reason="needs two ranks")
@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.to(memory_format=torch.channels_last),
        lambda module: module.double(),
        lambda module: setattr(module.layers[0].weight, "data", torch.ones(5, 3, 3, 3)),
    ],
    ids=["channels_last", "double", "shape"],
)
def test_parameters_changed_on_one_rank_before_buckets_are_rebuilt(change, views):
    wrapped = DDP(Images(), gradient_as_bucket_view=views)
    _loss(wrapped, torch.randn(2, 3, 4, 4), True).backward()
    if RANK == SIZE - 1:
        change(wrapped.module)
    with together(), pytest.raises(RuntimeError, match=f"on rank {SIZE - 1} parameter 'layers"):
        wrapped(torch.randn(2, 3, 4, 4))


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_between_forward_and_backward(change, views):
    wrapped = DDP(Images(), gradient_as_bucket_view=views)
    for step in range(2 * STEPS):
        batch = torch.randn(2 * SIZE, 3, 4, 4)
        expected = mean_of_ranks(
            wrapped.module, lambda m, rank, batch=batch: _loss(m, share(batch, rank), True)
        )
        if change in ("double and float", "share_memory", "channels_last", "contiguous"):
            # The parameters change too, which autograd needs as they were.
            wrapped.zero_grad(set_to_none=step % 2 == 0)
            CHANGES[change](wrapped.module)
            loss = _loss(wrapped, share(batch), True)
        else:
            loss = _loss(wrapped, share(batch), True)
            wrapped.zero_grad(set_to_none=step % 2 == 0)
            CHANGES[change](wrapped.module)
        loss.backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), expected, 5)
        assert_replicated(wrapped)


@pytest.mark.essential(keep=2)
@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("change", ["new data", "set_", "gradients shared", "replaced"])
def test_changed_by_a_hook(change, views, in_python):
    """Of its own parameter, when autograd has just made the gradient."""
    changes = {"new data": _new_data, "set_": _set}
    changes["gradients shared"] = lambda parameter: parameter.grad.share_memory_()
    changes["replaced"] = lambda parameter: setattr(parameter, "grad", parameter.grad.clone())
    wrapped = DDP(Images(), gradient_as_bucket_view=views, bucket_cap_mb=1e-6)
    for parameter in wrapped.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: (changes[change](p), None)[1])
    _train(wrapped, lambda module: None)


def _given(dtype=torch.float32) -> GivenGradients:
    return GivenGradients(
        a=torch.zeros(3, 3, dtype=dtype), b=torch.zeros(3, 3, dtype=dtype), c=torch.zeros(2)
    )


def _ramp(module, factor=1.0):
    return {
        name: torch.arange(1.0, 1 + p.numel()).to(p.dtype).view_as(p) * factor * (RANK + 1)
        for name, p in module.named_parameters()
    }


MEAN = (SIZE + 1) / 2


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_own_memory_in_another_order(dtype, views, in_python):
    """A gradient that is the memory of its place, but transposed or conjugated."""
    module = _given(dtype)
    wrapped = DDP(module, gradient_as_bucket_view=views)
    wrapped(_ramp(module)).backward()
    for _ in range(STEPS):
        expected = {}
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2:
                parameter.grad = parameter.grad.t()
            if dtype.is_complex and parameter.is_complex():
                parameter.grad = (parameter.grad * 1j).conj()
            expected[name] = parameter.grad.clone() + _ramp(module)[name] / (RANK + 1) * MEAN
        wrapped(_ramp(module)).backward()
        with together():
            for name, parameter in module.named_parameters():
                assert torch.allclose(parameter.grad, expected[name]), name
        assert_replicated(wrapped)


def test_gradient_of_another_parameter(views, in_python):
    """`.grad` is set to another parameter's: its memory is not the place of this one."""
    module = _given()
    wrapped = DDP(module, gradient_as_bucket_view=views)
    wrapped(_ramp(module)).backward()
    for _ in range(STEPS):
        module.a.grad = module.b.grad
        module.b.grad = None
        before = module.a.grad.clone()
        wrapped(_ramp(module)).backward()
        ramp = _ramp(module)["a"] / (RANK + 1) * MEAN
        with together():
            assert torch.equal(module.a.grad, before + ramp)
            assert torch.equal(module.b.grad, ramp)
            assert lies_in_buckets(wrapped, module.a.grad) == views
        assert_replicated(wrapped)


def test_gradients_do_not_reach_beyond_their_place(views):
    """Resized in place, a view would take its neighbours' memory."""
    module = _given()
    wrapped = DDP(module, gradient_as_bucket_view=views)
    for _ in range(STEPS):
        wrapped.zero_grad()
        wrapped(_ramp(module)).backward()
        neighbours = [module.b.grad.clone(), module.c.grad.clone()]
        gradient = module.a.grad
        if views:
            with together(), pytest.raises(RuntimeError, match="not resizable"):
                gradient.resize_(100)
        else:
            gradient.resize_(100).fill_(1.0)
        with together():
            assert torch.equal(module.b.grad, neighbours[0])
            assert torch.equal(module.c.grad, neighbours[1])


def _wider(parameter):
    parameter.grad.data = torch.ones(4, *parameter.shape)


def _flat_and_short(parameter):
    parameter.grad.data = torch.ones(1)


def _other_dtype(parameter):
    parameter.grad.data = parameter.grad.double()


@pytest.mark.parametrize("change", [_wider, _flat_and_short, _other_dtype])
def test_what_does_not_fit_is_refused(change, views, in_python):
    module = _given()
    wrapped = DDP(module, gradient_as_bucket_view=views)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(change)
    with together(), pytest.raises(RuntimeError, match="parameter 'c' of shape") as got:
        # Named in reverse, so that c comes first.
        wrapped(_ramp(module)).backward()
    with together():
        assert "got a gradient of shape" in str(got.value)
        assert "wrapped again" in str(got.value)


def test_module_of_another_dtype(views):
    wrapped = DDP(nn.Linear(3, 2), gradient_as_bucket_view=views)
    for _ in range(2):  # buckets are not rebuilt after that
        wrapped(torch.ones(1, 3)).sum().backward()
    wrapped.double()
    wrapped.zero_grad()
    with together(), pytest.raises(RuntimeError, match=r"dtype torch.float64 .* wrapped again"):
        wrapped(torch.ones(1, 3).double()).sum().backward()


def test_parameter_of_another_shape(views, in_python):
    wrapped = DDP(nn.Linear(3, 4), gradient_as_bucket_view=views)
    for _ in range(2):
        wrapped(torch.ones(1, 3)).sum().backward()
    wrapped.zero_grad()
    wrapped.module.weight.data = torch.ones(4, 2)
    with together(), pytest.raises(RuntimeError, match=r"shape \(4, 2\), .* wrapped again"):
        wrapped(torch.ones(1, 2)).sum().backward()


def test_data_of_parameters_in_another_order(views, in_python):
    """The gradients' layout follows the parameters', that of the buckets does not."""
    wrapped = DDP(_given(), gradient_as_bucket_view=views)
    module = wrapped.module
    for step in range(2 * STEPS):
        module.a.data = module.a.data.t().contiguous().t() if step % 2 else torch.zeros(3, 3)
        wrapped.zero_grad(set_to_none=step % 3 == 0)
        wrapped(_ramp(module, step)).backward()
        with together():
            for name, parameter in module.named_parameters():
                assert torch.allclose(parameter.grad, _ramp(module, step)[name] / (RANK + 1) * MEAN)
        assert_replicated(wrapped)


# While the gradients are averaged.


def _late_change(wrapped, change):
    """Let the last gradient's arrival change those that are on their way already."""
    done = []

    def hook(parameter):
        if not done:
            done.append(True)
            for other in (wrapped.module.b, wrapped.module.c):
                change(other)

    # c, b, a is the order in which gradients come.
    return wrapped.module.a.register_post_accumulate_grad_hook(hook)


LATE = {
    "replaced": lambda p: setattr(p, "grad", torch.full_like(p, 7.0)),
    "new data": lambda p: setattr(p.grad, "data", torch.full_like(p, 7.0)),
    "memory freed": lambda p: p.grad.set_(torch.full_like(p, 7.0)),
    "dropped": lambda p: setattr(p, "grad", None),
}


@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("change", LATE)
@pytest.mark.parametrize("option", ["plain", "find_unused_parameters", "fp16"])
def test_changed_while_it_is_averaged(change, option, views, in_python):
    """The mean goes to what `.grad` is then; a view that has left is an error, as in torch."""
    module = _given()
    options = {} if option != "find_unused_parameters" else {option: True}
    wrapped = DDP(module, gradient_as_bucket_view=views, bucket_cap_mb=1e-6, **options)
    if option == "fp16":
        wrapped.register_comm_hook(None, compression.fp16)
    wrapped(_ramp(module)).backward()
    handle = _late_change(wrapped, LATE[change])
    wrapped.zero_grad()
    loss = wrapped(_ramp(module))
    if views and change != "dropped":
        with together(), pytest.raises(RuntimeError, match=r"the gradient of .* was replaced"):
            loss.backward()
        return
    loss.backward()
    handle.remove()
    for _ in range(2):
        with together():
            for name, parameter in module.named_parameters():
                assert torch.allclose(
                    parameter.grad, _ramp(module)[name] / (RANK + 1) * MEAN, rtol=1e-2
                ), name
        assert_replicated(wrapped)
        wrapped.zero_grad()
        wrapped(_ramp(module)).backward()


def test_joined_rank_keeps_its_gradients(views):
    """Also those that are the bucket's memory in another order."""
    module = _given()
    wrapped = DDP(module, gradient_as_bucket_view=views)
    wrapped(_ramp(module)).backward()
    with wrapped.join(divide_by_initial_world_size=False):
        wrapped.zero_grad()
        wrapped(_ramp(module)).backward()
        if RANK == 0:
            module.a.grad = module.a.grad.t()
            kept = copy.deepcopy(gradients_of(module))
        for _ in range(RANK and STEPS):
            wrapped.zero_grad()
            wrapped(_ramp(module)).backward()
    with together():
        if RANK == 0:
            assert_gradients_close(gradients_of(module), kept)


def test_deleted_wrapper_leaves_the_gradients(views):
    module = _given()
    wrapped = DDP(module, gradient_as_bucket_view=views)
    for _ in range(STEPS):
        wrapped.zero_grad()
        wrapped(_ramp(module)).backward()
    del wrapped
    gc.collect()
    with together():
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.grad, _ramp(module)[name] / (RANK + 1) * MEAN)
            parameter.grad.fill_(1.0)

"""Communication hooks in Python do the same on our class as on torch's own over Gloo."""

import copy
import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, GivenGradients, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    STEPS,
    assert_close,
    assert_gradients_close,
    assert_replicated,
    bits,
    gather,
    gradients_of,
    mean_of_ranks,
    share,
    together,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides"),
    # Of torch's own quantization hooks.
    pytest.mark.filterwarnings("ignore:.*quantization:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max"),
]
several = pytest.mark.mpi(min_size=2)

Future = torch.futures.Future
SMALL_BUCKETS = 0.0005


def completed(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def all_reduce(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """What no hook does, in Python: torch's own is recognised and done without."""
    assert isinstance(bucket, dist.GradBucket)
    return default_hooks.allreduce_hook(state, bucket)


def never_returns_in_place(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    total = bucket.buffer().clone()
    work = dist.all_reduce(total, group=state, async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / SIZE)


def replaces_buffer(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """A hook that lets the bucket hold something else."""
    bucket.set_buffer(torch.cat([bucket.buffer() / SIZE, torch.full((2,), 7.0)]))
    assert sum(gradient.numel() for gradient in bucket.gradients()) == bucket.buffer().numel() - 2
    dist.all_reduce(bucket.buffer(), group=state)
    return completed(torch.cat([gradient.flatten() for gradient in bucket.gradients()]))


def resizes_buffer(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """A hook that needs more memory than the bucket has, as batched PowerSGD does."""
    buffer = bucket.buffer()
    count = buffer.numel()
    buffer.resize_(count + 1000)
    buffer[count:].fill_(7.0)
    dist.all_reduce(buffer.div_(SIZE), group=state)
    return completed(buffer.resize_(count))


def in_bfloat16(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """The wrapper of torch under another name: by its own name torch's class wants a GPU for it."""
    future = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)(state, bucket)
    assert isinstance(future, torch._C.Future)
    return future


def one_at_a_time(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return `hook` so that Gloo is done with a bucket before the next.

    Callbacks of Gloo's futures run on its threads in any order: collectives that they start,
    as in PowerSGD, meet others on other ranks.
    """

    @functools.wraps(hook)
    def waits(state: Any, bucket: dist.GradBucket) -> Any:
        future = hook(state, bucket)
        future.wait()
        return future

    return waits


def power_sgd(group: Any, **options: Any) -> powerSGD_hook.PowerSGDState:
    settings = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, **options}
    return powerSGD_hook.PowerSGDState(group, min_compression_rate=0.5, **settings)


@dataclass(frozen=True)
class Given:
    """A hook, its state for a group, and how far rounding may take it in one step."""

    hook: Callable[..., Any]
    state: Callable[[Any], Any] = lambda group: group
    factor: float = 5
    replicated: bool = True


HOOKS = {
    "all-reduce": Given(all_reduce),
    "out of place": Given(never_returns_in_place),
    "replaced buffer": Given(replaces_buffer),
    "float16": Given(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), factor=300),
    "bfloat16": Given(in_bfloat16, factor=2000),
    "PowerSGD": Given(powerSGD_hook.powerSGD_hook, power_sgd, 500),
    "PowerSGD, cold": Given(
        powerSGD_hook.powerSGD_hook,
        lambda group: power_sgd(
            group, use_error_feedback=False, warm_start=False, start_powerSGD_iter=1
        ),
        500,
    ),
    "PowerSGD in float16": Given(
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), power_sgd, 2000
    ),
    "resized buffer": Given(resizes_buffer),
    "post-localSGD": Given(
        post_localSGD_hook.post_localSGD_hook,
        lambda group: post_localSGD_hook.PostLocalSGDState(group, group, 2),
    ),
    "post-localSGD, alone": Given(
        post_localSGD_hook.post_localSGD_hook,
        lambda group: post_localSGD_hook.PostLocalSGDState(
            group, None, 2, post_local_gradient_allreduce=False
        ),
        replicated=False,
    ),
    "none": Given(debugging_hooks.noop_hook, replicated=False),
}


def wrap_both(
    module: nn.Module, gloo: dist.ProcessGroup, given: Given, **options: Any
) -> tuple[DDP, TorchDDP]:
    """Return two equal models with the same hook, wrapped by our class and by torch's."""
    ours = DDP(copy.deepcopy(module), **options)
    theirs = TorchDDP(copy.deepcopy(module), process_group=gloo, **options)
    ours.register_comm_hook(given.state(dist.group.WORLD), given.hook)
    theirs.register_comm_hook(given.state(gloo), one_at_a_time(given.hook))
    return ours, theirs


@pytest.mark.essential(keep=6)
@pytest.mark.smoke(keep=2)
@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("name", HOOKS)
def test_as_torch(name, views, gloo):
    given = HOOKS[name]
    module = mlp(6, 20, 20, 9, 4, dtype=torch.float32)
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": SMALL_BUCKETS}
    pair = wrap_both(module, gloo, given, **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5) for model in pair]
    for step in range(4):
        batch = share(torch.randn(4 * SIZE, 6))
        for model, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=step != 2)
            loss_of(model, batch).backward()
            optimizer.step()
        with together():
            assert_gradients_close(*map(gradients_of, pair), given.factor)
            for own, theirs in zip(*(model.parameters() for model in pair), strict=True):
                assert_close(own, theirs, "parameter", given.factor)
    if given.replicated:
        assert_replicated(pair[0])
    with together():
        assert len(pair[0].reducer.buckets) > 2
        logged = [model._get_ddp_logging_data()["comm_hook"] for model in pair]
        assert logged == [given.hook.__qualname__] * 2


@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_model(case, views, gloo):
    pair = wrap_both(CASES[case].make(), gloo, HOOKS["all-reduce"], gradient_as_bucket_view=views)
    for step in range(STEPS):
        batch = share(CASES[case].batch(2 * SIZE))
        for model in pair:
            model.zero_grad(set_to_none=step != 1)
            loss_of(model, batch).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair), 2, CASES[case].rounding)
    assert_replicated(pair[0])


@pytest.mark.essential(keep=1)
def test_power_sgd_of_channels_last(views):
    """Hooks view gradients as matrices, also those of layers in channels_last."""
    wrapped = DDP(CASES["channels_last"].make(), gradient_as_bucket_view=views)
    wrapped.register_comm_hook(power_sgd(None), powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        wrapped.zero_grad()
        loss_of(wrapped, share(CASES["channels_last"].batch(2 * SIZE))).backward()
        assert_replicated(wrapped)
    with together():
        assert wrapped._comm_hooks[0][1].iter == 4


def test_batched_power_sgd(views, gloo):
    """Until it begins to compress: from then on torch 2.13's hook refuses its own matrices."""
    batched = Given(powerSGD_hook.batched_powerSGD_hook, power_sgd)
    pair = wrap_both(mlp(3, 8, 4), gloo, batched, gradient_as_bucket_view=views)
    for _ in range(2):
        batch = torch.randn(2, 3, dtype=torch.float64) + RANK
        for model in pair:
            model.zero_grad()
            loss_of(model, batch).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair))
    with together(), pytest.raises(RuntimeError, match=r"batched_powerSGD_hook.* AssertionError"):
        loss_of(pair[0], batch).backward()
    with together(), pytest.raises(AssertionError):
        loss_of(pair[1], batch).backward()


@pytest.mark.parametrize(
    "hook",
    [
        quantization_hooks.quantization_pertensor_hook,
        quantization_hooks.quantization_perchannel_hook,
    ],
    ids=["by tensor", "by channel"],
)
def test_quantization(hook, views):
    """Against the mean itself: torch's class on Gloo cannot run these hooks."""
    model = mlp(6, 20, 9, 4, dtype=torch.float32)
    wrapped = DDP(model, gradient_as_bucket_view=views, bucket_cap_mb=SMALL_BUCKETS)
    wrapped.register_comm_hook(None, hook)
    for _ in range(STEPS):
        batch = torch.randn(4 * SIZE, 6)
        wrapped.zero_grad()
        loss_of(wrapped, share(batch)).backward()
        expected = mean_of_ranks(
            model, lambda module, rank, batch=batch: loss_of(module, share(batch, rank))
        )
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        with together():
            for name, gradient in gradients_of(wrapped).items():
                # Half of a 255th of the range, which reaches from -largest to largest at most.
                error = float((gradient - expected[name]).abs().max())
                assert error < largest * SIZE / 100, name
                assert error or not gradient.any(), f"{name} was not quantized"
        assert_replicated(wrapped)


@pytest.mark.essential(keep=3)
@pytest.mark.parametrize("kind", [kind for kind in DDPCommHookType if "QUANTIZE" not in kind.name])
def test_registered_by_name(kind, gloo):
    module = mlp(3, 4, 2, dtype=torch.float32)
    ours = DDP(copy.deepcopy(module))
    theirs = TorchDDP(module, process_group=gloo)
    register_ddp_comm_hook(kind, ours, dist.group.WORLD)
    if kind is DDPCommHookType.BF16_COMPRESS:
        theirs.register_comm_hook(gloo, in_bfloat16)
    else:
        register_ddp_comm_hook(kind, theirs, gloo)
    batch = torch.randn(2, 3) + RANK
    for model in (ours, theirs):
        loss_of(model, batch).backward()
    with together():
        assert_gradients_close(gradients_of(ours), gradients_of(theirs), 2000)


@pytest.mark.essential(keep=1)
def test_what_a_bucket_shows(views, gloo):
    """The same indices, parameters and gradients as torch's, in the same order."""
    seen: dict[int, list[Any]] = {}

    def record(state: tuple[int, nn.Module], bucket: dist.GradBucket) -> Future[torch.Tensor]:
        key, module = state
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        buffer = bucket.buffer()
        assert buffer is bucket.buffer()
        assert not buffer.requires_grad
        for gradient in bucket.gradients():
            assert gradient.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        # With views `.grad` is in that memory too: what a hook changes in place is seen there.
        start = buffer.data_ptr()
        offsets = [views and p.grad.data_ptr() - start for p in bucket.parameters()]
        if key == 0:
            own = ours.reducer.buckets[bucket.index()].gradients
            assert (buffer.data_ptr(), buffer.shape) == (own.data_ptr(), own.shape)
        seen.setdefault(key, []).append(
            (
                bucket.index(),
                bucket.is_last(),
                buffer.tolist(),
                [gradient.tolist() for gradient in bucket.gradients()],
                [names[id(parameter)] for parameter in bucket.parameters()],
                offsets,
            )
        )
        return completed(buffer)

    module = mlp(6, 20, 20, 9, 4, dtype=torch.float32)
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": SMALL_BUCKETS}
    ours = DDP(copy.deepcopy(module), **options)
    theirs = TorchDDP(copy.deepcopy(module), process_group=gloo, **options)
    for key, model in enumerate((ours, theirs)):
        model.register_comm_hook((key, model.module), record)
    for step in range(STEPS):
        if step == 1:
            seen.clear()  # torch makes one bucket of all parameters for the first backward
        batch = torch.randn(2, 6) + RANK
        for model in (ours, theirs):
            model.zero_grad()
            loss_of(model, batch).backward()
    with together():
        assert seen[0] == seen[1]
        assert len(seen[0]) > 2 * (STEPS - 1)


def test_gradients_of_parameters_that_are_not_contiguous(views):
    """In torch's gradients() their elements are mixed up."""
    module = GivenGradients(
        transposed=torch.zeros(3, 2).t(), sliced=torch.zeros(2, 6)[:, ::2], plain=torch.zeros(2)
    )
    coefficients = {
        "transposed": torch.arange(6.0).view(2, 3),
        "sliced": torch.arange(6.0).view(2, 3) + 10,
        "plain": torch.arange(2.0) + 20,
    }

    def check(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = next(name for name, own in module.named_parameters() if own is parameter)
            assert torch.equal(gradient, coefficients[name]), name
            gradient.mul_(2)
        return completed(bucket.buffer())

    wrapped = DDP(module, gradient_as_bucket_view=views)
    wrapped.register_comm_hook(None, check)
    for _ in range(STEPS):
        wrapped.zero_grad()
        wrapped(coefficients).backward()
        with together():
            for name, parameter in module.named_parameters():
                assert torch.equal(parameter.grad, 2 * coefficients[name]), name


def test_set_buffer_wants_a_tensor():
    def hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        bucket.set_buffer([1.0])  # type: ignore[arg-type]

    wrapped = DDP(nn.Linear(3, 2))
    wrapped.register_comm_hook(None, hook)
    loss = wrapped(torch.ones(1, 3)).sum()
    with together(), pytest.raises(RuntimeError, match=r"TypeError: set_buffer\(\) needs a"):
        loss.backward()


class TestParametersWithoutGradient:
    @pytest.mark.parametrize("name", ["all-reduce", "out of place", "resized buffer"])
    def test_unused_in_turn(self, name, views, gloo):
        """The same gradients, or None, when ranks use different parameters at each step."""
        names = ["a", "b", "c", "d"]
        module = GivenGradients(**{own: torch.zeros(3, 40) for own in names})
        options = {
            "find_unused_parameters": True,
            "gradient_as_bucket_view": views,
            "bucket_cap_mb": SMALL_BUCKETS,
        }
        pair = wrap_both(module, gloo, HOOKS[name], **options)
        generator = torch.Generator().manual_seed(3)
        for step in range(6):
            used = torch.rand(SIZE, 4, generator=generator) < 0.4
            used[:, 0] = True
            if step < 2:
                used[:, 3] = False
            given = {
                own: torch.randn(3, 40) + RANK
                for column, own in enumerate(names)
                if used[RANK, column]
            }
            for model in pair:
                # Old gradients stay on even steps: who is unused everywhere must keep them.
                if step % 2:
                    model.zero_grad()
                model(given).backward()
            with together():
                assert_gradients_close(*map(gradients_of, pair), 500)

    @several
    def test_missing_gradients_are_reported(self, views):
        module = GivenGradients(used=torch.zeros(3), missed=torch.zeros(4))
        wrapped = DDP(module, gradient_as_bucket_view=views)
        wrapped.register_comm_hook(dist.group.WORLD, all_reduce)
        ones = {"used": torch.ones(3), "missed": torch.ones(4)}
        if RANK == SIZE - 1:
            del ones["missed"]
        wrapped(ones).backward()
        with together():
            assert torch.equal(module.missed.grad, torch.full((4,), (SIZE - 1) / SIZE))
        with together(), pytest.raises(RuntimeError, match=f"'missed'.*on rank {SIZE - 1}"):
            wrapped(ones)


@pytest.mark.parametrize("name", ["all-reduce", "PowerSGD", "resized buffer"])
def test_accumulation_under_no_sync(name, views, gloo):
    module = mlp(3, 8, 4, dtype=torch.float32)
    pair = wrap_both(module, gloo, HOOKS[name], gradient_as_bucket_view=views)
    for step in range(6):
        batch = torch.randn(2, 3) + RANK
        for model in pair:
            if step % 3 == 2:
                loss_of(model, batch).backward()
            else:
                with model.no_sync():
                    loss_of(model, batch).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair), 500)


class Embedded(nn.Module):
    """A sparse gradient between two dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 3, sparse=True)
        self.layer = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.layer(self.embedding(tokens))
        return output


def test_sparse_gradients(views, gloo):
    pair = wrap_both(Embedded(), gloo, HOOKS["all-reduce"], gradient_as_bucket_view=views)
    for _ in range(STEPS):
        tokens = torch.randint(10, (4,)) if RANK else torch.tensor([1, 1, 3, 3])
        for model in pair:
            model.zero_grad()
            loss_of(model, tokens).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair))
        assert_replicated(pair[0])


def test_registered_late(views, gloo):
    """After steps without a hook, as torch's class allows."""
    module = mlp(3, 4, 2, dtype=torch.float32)
    pair = (
        DDP(copy.deepcopy(module), gradient_as_bucket_view=views),
        TorchDDP(module, process_group=gloo, gradient_as_bucket_view=views),
    )
    for step in range(5):
        if step == 3:
            for model in pair:
                model.register_comm_hook(None, lambda state, bucket: completed(-bucket.buffer()))
        batch = torch.randn(2, 3) + RANK
        for model in pair:
            model.zero_grad(set_to_none=step != 3)
            loss_of(model, batch).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair))


def copied_by_pickle(wrapped: DDP) -> DDP:
    copied = pickle.loads(pickle.dumps(wrapped))
    assert isinstance(copied, DDP)
    return copied


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("copier", [copy.deepcopy, copied_by_pickle], ids=["deepcopy", "pickle"])
@pytest.mark.filterwarnings("ignore:.*process_group:UserWarning")
def test_copies_have_the_hook(copier, views):
    wrapped = DDP(mlp(3, 8, 4, dtype=torch.float32), gradient_as_bucket_view=views)
    wrapped.register_comm_hook(power_sgd(None), powerSGD_hook.powerSGD_hook)
    batch = torch.randn(2, 3) + RANK
    for _ in range(3):
        wrapped.zero_grad()
        loss_of(wrapped, batch).backward()
    copied = copier(wrapped)
    for model in (wrapped, copied):
        model.zero_grad()
        loss_of(model, batch).backward()
    with together():
        assert copied._get_ddp_logging_data()["comm_hook"] == "powerSGD_hook"
        assert copied._comm_hooks[0][1].iter == wrapped._comm_hooks[0][1].iter
    assert_replicated(copied)


@several
def test_hook_on_a_subgroup(gloo):
    """A recognised hook with another group than the module's is called as any other."""
    pairs, _ = dist.new_subgroups_by_enumeration(
        [[rank] for rank in range(SIZE - 1)] + [[SIZE - 1]]
    )
    wrapped = DDP(nn.Linear(3, 2))
    wrapped.register_comm_hook(pairs, default_hooks.allreduce_hook)
    wrapped(torch.full((1, 3), 1.0 + RANK)).sum().backward()
    with together():
        assert wrapped.module.weight.grad.unique().tolist() == [1.0 + RANK]
    ours = DDP(nn.Linear(3, 2))
    ours.register_comm_hook(gloo, default_hooks.fp16_compress_hook)
    ours(torch.full((1, 3), 1.0 + RANK)).sum().backward()
    assert len(set(gather(bits(ours.module.weight.grad)))) == 1
    with together():
        assert_close(ours.module.weight.grad, torch.full((2, 3), (SIZE + 1) / 2), "weight", 100)
    dist.destroy_process_group(pairs)

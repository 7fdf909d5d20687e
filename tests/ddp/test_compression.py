"""Gradients that travel in 16 bits: which bits arrive, what is left alone, what is refused."""

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, GivenGradients, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    STEPS,
    assert_gradients_close,
    assert_replicated,
    bits,
    gather,
    gradients_of,
    share,
    together,
)
from torch import Tensor, nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import mpiddp
from mpiddp import DistributedDataParallel as DDP
from mpiddp.compression import bf16, fp16
from mpiddp.mpi import nodes
from mpiddp.reducer.bucket import bytes_needed

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides"),
]
several = pytest.mark.mpi(min_size=2)

HALVES = {fp16: torch.float16, bf16: torch.bfloat16}
MANY = 70_001  # enough for several chunks, and for the copies that release the GIL
SMALL_BUCKETS = 0.0002


@pytest.fixture(params=HALVES, ids=["fp16", "bf16"])
def hook(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=["shared", "exchange", "mpi"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def in_python(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return default_hooks.allreduce_hook(None, bucket)


def given(parameters: Mapping[str, Tensor], step: int, rank: int) -> dict[str, Tensor]:
    """Return gradients that every rank can draw for any rank.

    They are multiples of 2^-16 and smaller than 1, and so are their roundings: sums in float32
    are exact, in whatever order a transport adds.
    """
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randint(-(2**16) + 1, 2**16, parameter.shape, generator=generator)
        .div(2**16)
        .to(parameter.dtype)
        for name, parameter in parameters.items()
    }


def exact_mean(gradients: list[Tensor], half: torch.dtype, last_alone: bool = False) -> Tensor:
    """Return the mean as it should arrive: rounded to 16 bits, summed wide, rounded once.

    With the last rank on a node of its own, what the node of the others sends is rounded, too.
    """
    total = torch.zeros(gradients[0].shape, dtype=torch.float32)
    for gradient in gradients[:-1]:
        total += gradient.to(half).float()
    if last_alone:
        total = total.to(half).float()
    total += gradients[-1].to(half).float()
    return (total / SIZE).to(half).to(gradients[0].dtype)


def assert_exact(
    model: nn.Module,
    everyone: list[dict[str, Tensor]],
    half: torch.dtype,
    old: float = 0,
    last_alone: bool = False,
) -> None:
    """Assert the exact mean of what `everyone` has given, for every parameter."""
    for name, parameter in model.named_parameters():
        zero = torch.zeros(parameter.shape, dtype=parameter.dtype)
        gradients = [own.get(name, zero) for own in everyone]
        expected = exact_mean(gradients, half, last_alone) + old
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, expected), name


def some_model() -> GivenGradients:
    return GivenGradients(
        big=torch.zeros(MANY),
        transposed=torch.zeros(5, 4).t(),
        wide=torch.zeros(3, 7, dtype=torch.float64),
        empty=torch.zeros(0, 2),
        sliced=torch.zeros(6, 8)[:, ::2],
        big_and_wide=torch.zeros(MANY, dtype=torch.float64),
        scalar=torch.zeros(()),
    )


@pytest.mark.thorough(keep=8)
@pytest.mark.essential(keep=3)
@pytest.mark.parametrize("cap", [None, SMALL_BUCKETS], ids=["one bucket", "many"])
def test_bits_that_arrive(hook, transport, views, cap):
    model = some_model()
    wrapped = DDP(model, gradient_as_bucket_view=views, transport=transport, bucket_cap_mb=cap)
    wrapped.register_comm_hook(None, hook)
    parameters = dict(model.named_parameters())
    for step in range(STEPS):
        wrapped.zero_grad(set_to_none=step != 1)
        wrapped(given(parameters, step, RANK)).backward()
        with together():
            assert_exact(model, [given(parameters, step, r) for r in range(SIZE)], HALVES[hook])
            assert wrapped.reducer.has_rebuilt_buckets == (step > 0)
        assert_replicated(wrapped)


@several
def test_between_nodes(hook, views, monkeypatch):
    """The last rank stands for a node of its own."""
    monkeypatch.setattr(
        nodes, "ranks_of_node", lambda comm: comm.Split(int(RANK == SIZE - 1), RANK)
    )
    group = dist.new_group()
    model = some_model()
    wrapped = DDP(model, process_group=group, gradient_as_bucket_view=views, transport="shared")
    assert type(wrapped.reducer.channel.transport).__name__ == "LaneTransport"
    wrapped.register_comm_hook(group, hook)
    parameters = dict(model.named_parameters())
    for step in range(STEPS):
        wrapped.zero_grad(set_to_none=step != 1)
        wrapped(given(parameters, step, RANK)).backward()
        with together():
            everyone = [given(parameters, step, r) for r in range(SIZE)]
            assert_exact(model, everyone, HALVES[hook], last_alone=True)
        assert_replicated(wrapped)
    dist.destroy_process_group(group)


@pytest.mark.essential(keep=4)
@pytest.mark.smoke(keep=1)
@pytest.mark.thorough(keep=9)
@pytest.mark.parametrize("case", [name for name in CASES if "complex" not in name])
def test_as_torch_on_gloo(case, hook, views, gloo):
    """Also: our hooks are hooks that torch's own class can use (its bf16 hook wants a GPU)."""
    module = CASES[case].make()
    ours = DDP(copy.deepcopy(module), gradient_as_bucket_view=views)
    theirs = TorchDDP(module, process_group=gloo, gradient_as_bucket_view=views)
    theirs.register_comm_hook(gloo, default_hooks.fp16_compress_hook if hook is fp16 else hook)
    ours.register_comm_hook(ours.process_group, hook)
    # Gloo adds in 16 bits, after each rank has divided.
    rounding = max(CASES[case].rounding, 0.02 if hook is bf16 else 0.004)
    for step in range(STEPS):
        batch = share(CASES[case].batch(2 * SIZE))
        for model in (ours, theirs):
            model.zero_grad(set_to_none=step != 1)
            loss_of(model, batch).backward()
        with together():
            assert_gradients_close(gradients_of(ours), gradients_of(theirs), rounding=rounding)
        assert_replicated(ours)


def test_float64_is_rounded_once(hook, views):
    """By way of float32 the first would come down to 1."""
    places = 11 if hook is fp16 else 8
    values = [1 + 2.0**-places + 2.0**-40, 1 + 2.0**-places - 2.0**-40]
    model = GivenGradients(a=torch.zeros(2, dtype=torch.float64))
    wrapped = DDP(model, gradient_as_bucket_view=views)
    wrapped.register_comm_hook(None, hook)
    wrapped({"a": torch.tensor(values, dtype=torch.float64)}).backward()
    with together():
        assert model.a.grad.tolist() == [1 + 2.0 ** (1 - places), 1]


def test_large_and_special_values(hook, transport, views):
    """No sum overflows on the way; what is too large for 16 bits is infinite."""
    model = GivenGradients(a=torch.zeros(5))
    wrapped = DDP(model, gradient_as_bucket_view=views, transport=transport)
    wrapped.register_comm_hook(None, hook)
    largest = float(torch.finfo(HALVES[hook]).max)
    # Four of bfloat16's largest do overflow: they are as large as float32's.
    fitting = largest if hook is fp16 else largest / 8
    beyond = 3.4e38 if hook is bf16 else 65520.0
    values = [fitting, -fitting, beyond, float("nan"), 2.0**-24]
    wrapped({"a": torch.tensor(values)}).backward()
    with together():
        arrived = model.a.grad.tolist()
        assert arrived[:3] == [fitting, -fitting, float("inf")]
        assert arrived[3] != arrived[3]
        assert arrived[4] == 2.0**-24
    assert_replicated(wrapped)


def mixed_model() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "layers": GivenGradients(
                in_float32=torch.zeros(9),
                in_float16=torch.zeros(7, dtype=torch.float16),
                in_bfloat16=torch.zeros(4, 3, dtype=torch.bfloat16),
                in_float64=torch.zeros(5, dtype=torch.float64),
                in_complex64=torch.zeros(5, dtype=torch.complex64),
            ),
            "embedding": nn.Embedding(10, 3, sparse=True),
        }
    )


class Mixed(nn.Module):
    """Parameters of every kind: those that are compressed, and those that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = mixed_model()

    def forward(self, coefficients: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        embedded: Tensor = self.parts["embedding"](tokens)
        total: Tensor = self.parts["layers"](coefficients) + (embedded**3).sum()
        return total


def test_other_gradients_travel_as_without_a_hook(hook, transport, views):
    plain = DDP(Mixed(), gradient_as_bucket_view=views, transport=transport)
    compressed = DDP(copy.deepcopy(plain.module), **options_of(plain))
    compressed.register_comm_hook(None, hook)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + RANK)
        coefficients = {
            name: torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            for name, parameter in plain.module.parts["layers"].named_parameters()
        }
        coefficients["in_complex64"] = torch.randn(5, dtype=torch.complex64, generator=generator)
        tokens = torch.randint(10, (4,), generator=generator)
        for model in (plain, compressed):
            model.zero_grad()
            model(coefficients, tokens).backward()
        with together():
            differing = {
                name
                for name, gradient in gradients_of(plain).items()
                if bits(gradient) != bits(gradients_of(compressed)[name])
            }
            assert differing == {"parts.layers.in_float32", "parts.layers.in_float64"}
        assert_replicated(compressed)


def options_of(wrapped: DDP) -> dict[str, Any]:
    return {
        "gradient_as_bucket_view": wrapped.gradient_as_bucket_view,
        "transport": wrapped._transport,
    }


def test_no_more_memory_than_needed(hook, views):
    """The buckets are of 16 bits; only gradients that are views have room of their own."""
    wrapped = DDP(mlp(4, 9, 2, dtype=torch.float32), gradient_as_bucket_view=views)
    wrapped.register_comm_hook(None, hook)
    for _ in range(2):
        loss_of(wrapped, torch.ones(2, 4)).backward()
        with together():
            for bucket in wrapped.reducer.buckets:
                count = sum(wrapped.reducer.parameters[i].numel() for i in bucket.parameter_indices)
                members = [wrapped.reducer.parameters[i] for i in bucket.parameter_indices]
                flags = bytes_needed(members, HALVES[hook], flags_only=True) // 2
                assert flags < len(members) + 32
                assert bucket.buffer.dtype is HALVES[hook]
                assert bucket.buffer.numel() == count + flags
                assert bucket.memory.buffer.numel() == 2 * (count + flags)
                assert (bucket.gradient_buffer is not None) == views
                if views:
                    assert bucket.gradient_buffer.numel() == count
                    gradient = wrapped.reducer.parameters[bucket.parameter_indices[0]].grad
                    assert gradient.data_ptr() == bucket.gradient_buffer.data_ptr()


class TestParametersWithoutGradient:
    def test_some_unused_on_some_ranks(self, hook, transport, views):
        sizes = {"a": 5, "b": MANY, "c": 17, "d": 2}
        model = GivenGradients(**{name: torch.zeros(size) for name, size in sizes.items()})
        wrapped = DDP(
            model,
            find_unused_parameters=True,
            gradient_as_bucket_view=views,
            transport=transport,
        )
        wrapped.register_comm_hook(None, hook)
        parameters = dict(model.named_parameters())

        def part(rank: int, step: int) -> dict[str, Tensor]:
            whole = given(parameters, step, rank)
            # Rank 0 uses a and b only, others the rest too: but none of them d.
            used = "ab" if rank == 0 else "bc"
            return {name: whole[name] for name in used}

        for step in range(STEPS):
            wrapped.zero_grad()
            wrapped(part(RANK, step)).backward()
            everyone = [part(rank, step) for rank in range(SIZE)]
            with together():
                for name, parameter in model.named_parameters():
                    if not any(name in own for own in everyone):
                        assert parameter.grad is None, name
                        continue
                    zero = torch.zeros_like(parameter)
                    expected = exact_mean([own.get(name, zero) for own in everyone], HALVES[hook])
                    assert parameter.grad.dtype is torch.float32
                    assert torch.equal(parameter.grad, expected), name
            assert_replicated(wrapped)

    def test_unused_everywhere_keep_their_gradient(self, hook, views):
        """Bit for bit, although it would not fit into 16 bits."""
        model = GivenGradients(used=torch.zeros(3), unused=torch.zeros(4))
        wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=views)
        wrapped.register_comm_hook(None, hook)
        for step in range(STEPS):
            model.unused.grad = torch.full((4,), 1 / 3 + step)
            wrapped({"used": torch.ones(3)}).backward()
            with together():
                assert torch.equal(model.unused.grad, torch.full((4,), 1 / 3 + step))

    @several
    def test_missing_gradients_are_reported(self, hook, transport, views):
        model = GivenGradients(used=torch.zeros(3), missed=torch.zeros(4))
        wrapped = DDP(model, gradient_as_bucket_view=views, transport=transport)
        wrapped.register_comm_hook(None, hook)
        ones = {"used": torch.ones(3), "missed": torch.ones(4)}
        if RANK == SIZE - 1:
            del ones["missed"]
        wrapped(ones).backward()
        with together():
            missed = torch.full((4,), (SIZE - 1) / SIZE).to(HALVES[hook]).float()
            assert torch.equal(model.missed.grad, missed)
        with together(), pytest.raises(RuntimeError, match=f"'missed'.*on rank {SIZE - 1}"):
            wrapped(ones)


def test_accumulation_under_no_sync(hook, views):
    """What has been accumulated in float32 travels as one."""
    model = GivenGradients(a=torch.zeros(5), b=torch.zeros(3, 4).t())
    wrapped = DDP(model, gradient_as_bucket_view=views)
    wrapped.register_comm_hook(None, hook)
    parameters = dict(model.named_parameters())
    for step in range(STEPS):
        wrapped.zero_grad(set_to_none=step != 1)
        with wrapped.no_sync():
            wrapped(given(parameters, 2 * step, RANK)).backward()
        wrapped(given(parameters, 2 * step + 1, RANK)).backward()
        parts = [[given(parameters, 2 * step + i, rank) for i in (0, 1)] for rank in range(SIZE)]
        with together():
            totals = [
                {name: first[name] + second[name] for name in first} for first, second in parts
            ]
            assert_exact(model, totals, HALVES[hook])
        assert_replicated(wrapped)


def test_registered_after_accumulation(hook, views):
    """A backward under no_sync has sent nothing yet: registering is still in time."""
    model = GivenGradients(a=torch.zeros(5))
    wrapped = DDP(model, gradient_as_bucket_view=views)
    with wrapped.no_sync():
        wrapped({"a": torch.full((5,), 1.0 + RANK)}).backward()
    wrapped.register_comm_hook(None, hook)
    for step in range(3):
        wrapped({"a": torch.full((5,), 1.0 + RANK)}).backward()
        mean = (SIZE + 1) / 2
        with together():
            assert model.a.grad.tolist() == [mean * (step + 2)] * 5


def pickled(wrapped: DDP) -> DDP:
    copied = pickle.loads(pickle.dumps(wrapped))
    assert isinstance(copied, DDP)
    return copied


@pytest.mark.parametrize("copier", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_copies_compress_too(copier, hook, views):
    wrapped = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views)
    wrapped.register_comm_hook(wrapped.process_group, hook)
    loss_of(wrapped, torch.ones(2, 3, dtype=torch.float64)).backward()
    wrapped.zero_grad()
    copied = copier(wrapped)
    batch = torch.randn(2, 3, dtype=torch.float64) + RANK
    for model in (wrapped, copied):
        loss_of(model, batch).backward()
    with together():
        for name, gradient in gradients_of(copied).items():
            assert bits(gradient) == bits(gradients_of(wrapped)[name])
            assert torch.equal(gradient, gradient.to(HALVES[hook]).double())
        with pytest.raises(RuntimeError, match="can only be called once"):
            copied.register_comm_hook(None, hook)


REGISTRATIONS: dict[str, tuple[Callable[[DDP], None], torch.dtype]] = {
    "torch's fp16": (
        lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook),
        torch.float16,
    ),
    "torch's bf16": (
        lambda m: m.register_comm_hook(m.process_group, default_hooks.bf16_compress_hook),
        torch.bfloat16,
    ),
    "torch's all-reduce": (
        lambda m: m.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook),
        torch.float32,
    ),
    "built-in fp16": (
        lambda m: m._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
        torch.float16,
    ),
    "built-in all-reduce": (
        lambda m: m._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
        torch.float32,
    ),
    "by its enumeration": (
        lambda m: ddp_comm_hooks.register_ddp_comm_hook(
            ddp_comm_hooks.DDPCommHookType.BF16_COMPRESS, m
        ),
        torch.bfloat16,
    ),
    "by the package": (
        lambda m: m.register_comm_hook(None, mpiddp.compression.fp16),
        torch.float16,
    ),
}


class TestRegistration:
    @pytest.mark.essential(keep=2)
    @pytest.mark.parametrize("name", REGISTRATIONS)
    def test_what_is_served(self, name, views):
        register, dtype = REGISTRATIONS[name]
        model = some_model()
        wrapped = DDP(model, gradient_as_bucket_view=views)
        register(wrapped)
        parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.dtype is torch.float32 or dtype is not torch.float32
        }
        everyone = [given(dict(model.named_parameters()), 0, rank) for rank in range(SIZE)]
        wrapped(everyone[RANK]).backward()
        with together():
            for own in parameters:
                expected = exact_mean([part[own] for part in everyone], dtype)
                assert torch.equal(model.get_parameter(own).grad, expected), own
            with pytest.raises(RuntimeError, match="can only be called once"):
                register(wrapped)
            assert wrapped._get_ddp_logging_data()["comm_hook"]

    def test_of_a_group_of_its_own(self, hook):
        group = dist.new_group()
        wrapped = DDP(nn.Linear(3, 2), process_group=group)
        wrapped.register_comm_hook(group, hook)
        wrapped(torch.full((1, 3), 1.0 + RANK)).sum().backward()
        with together():
            assert wrapped.module.weight.grad.unique().tolist() == [(SIZE + 1) / 2]
        dist.destroy_process_group(group)

    @pytest.mark.parametrize("state", [3, "world", object(), dist.GroupMember.NON_GROUP_MEMBER])
    def test_another_state(self, state, hook):
        wrapped = DDP(nn.Linear(3, 2))
        with together(), pytest.raises(ValueError, match=r"state of bf16|state of fp16"):
            wrapped.register_comm_hook(state, hook)

    @pytest.mark.essential(keep=1)
    @pytest.mark.parametrize("first", REGISTRATIONS)
    def test_twice(self, first, hook):
        wrapped = DDP(nn.Linear(3, 2))
        REGISTRATIONS[first][0](wrapped)
        message = (
            "^register_comm_hook or register_builtin_comm_hook can only be called once.$"  # torch's
        )
        with together(), pytest.raises(RuntimeError, match=message):
            wrapped.register_comm_hook(None, hook)

    def test_after_steps_without(self, hook, views):
        model = GivenGradients(a=torch.zeros(2), b=torch.zeros(3, 4).t())
        wrapped = DDP(model, gradient_as_bucket_view=views)
        parameters = dict(model.named_parameters())
        for step in range(2 * STEPS):
            if step == STEPS:
                wrapped.register_comm_hook(None, hook)
            wrapped.zero_grad(set_to_none=step != STEPS)
            wrapped(given(parameters, step, RANK)).backward()
            half = HALVES[hook] if step >= STEPS else torch.float32
            with together():
                assert_exact(model, [given(parameters, step, r) for r in range(SIZE)], half)

    @pytest.mark.parametrize("value", [None, 3, "fp16", torch.float16])
    def test_not_callable(self, value):
        wrapped = DDP(nn.Linear(3, 2))
        with together(), pytest.raises(TypeError, match="Communication hook must be callable"):
            wrapped.register_comm_hook(None, value)

    def test_annotated_as_no_hook(self):
        def bucket_of_another_type(state: object, bucket: int) -> Any:
            return bucket

        def another_result(state: object, bucket: dist.GradBucket) -> int:
            return 0

        wrapped = DDP(nn.Linear(3, 2))
        with together():
            with pytest.raises(ValueError, match="bucket annotation should be"):
                wrapped.register_comm_hook(None, bucket_of_another_type)
            with pytest.raises(ValueError, match="return annotation should be"):
                wrapped.register_comm_hook(None, another_result)

    def test_built_in_hook_of_another_type(self):
        wrapped = DDP(nn.Linear(3, 2))
        with together(), pytest.raises(TypeError, match="BuiltinCommHookType, not 'fp16'"):
            wrapped._register_builtin_comm_hook("fp16")

    @several
    @pytest.mark.parametrize(
        ("others", "effect"),
        [(bf16, "as torch.bfloat16"), (default_hooks.allreduce_hook, "as they are")],
        ids=["bf16", "all-reduce"],
    )
    def test_another_hook_on_another_rank(self, others, effect):
        wrapped = DDP(nn.Linear(3, 2))
        last = SIZE - 1
        with together(), pytest.raises(RuntimeError) as caught:
            wrapped.register_comm_hook(None, others if last == RANK else fp16)
        with together():
            assert (
                f"on rank {last} gradients travel {effect}, but as torch.float16 on rank"
            ) in str(caught.value)
            assert "register different communication hooks" in str(caught.value)

    @several
    @pytest.mark.parametrize("without", [0, SIZE - 1], ids=["not first", "not last"])
    @pytest.mark.parametrize(
        "chosen", [fp16, default_hooks.allreduce_hook, in_python], ids=lambda hook: hook.__name__
    )
    @pytest.mark.parametrize("buffers", [False, True], ids=["no buffers", "buffers"])
    def test_a_rank_without_the_hook(self, buffers, chosen, without):
        layers = [nn.BatchNorm1d(3)] if buffers else []
        wrapped = DDP(nn.Sequential(*layers, nn.Linear(3, 2)))

        def train() -> None:
            if without != RANK:
                wrapped.register_comm_hook(None, chosen)
            wrapped(torch.ones(2, 3)).sum().backward()

        with together(), pytest.raises(RuntimeError, match="different communication hooks") as told:
            train()
        with together():
            assert "without a hook" in str(told.value)

    @several
    def test_hooks_of_the_same_effect_on_different_ranks(self):
        wrapped = DDP(nn.Linear(3, 2))
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook if RANK else fp16)
        wrapped(torch.ones(1, 3)).sum().backward()
        assert len(set(gather(bits(wrapped.module.weight.grad)))) == 1

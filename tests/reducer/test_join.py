"""Uneven numbers of batches: join() does what it does for torch's class on Gloo."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from models import GivenGradients, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    all_bits,
    assert_close,
    assert_gradients_close,
    assert_same_bits,
    gather,
    gradients_of,
    together,
)
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch_versions import for_torch

from mpiddp import DistributedDataParallel as DDP

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.sizes,
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides"),
    pytest.mark.filterwarnings("ignore:Detected uneven input skew"),
]

# How many batches each rank has.
COUNTS: dict[str, Callable[[int], int]] = {
    "rank 0 ends first": lambda rank: 2 + rank,
    "rank 0 ends last": lambda rank: 1 + SIZE - rank,
    "rank 0 has none": lambda rank: 3 * min(rank, 1),
    "only rank 0 has any": lambda rank: 0 if rank else 3,
    "even": lambda rank: 2,
}

WAYS = pytest.mark.parametrize("transport", ["auto", "mpi"])


def wrap_both(
    module: nn.Module, group: dist.ProcessGroup, transport: str = "auto", **options: object
) -> tuple[DDP, TorchDDP]:
    return (
        DDP(copy.deepcopy(module), transport=transport, **options),
        TorchDDP(copy.deepcopy(module), process_group=group, **for_torch(options)),
    )


def batches(count: int, *shape: int) -> list[Tensor]:
    """Draw the batches of this rank, others than those of other ranks."""
    drawn = torch.randn(SIZE, max(count, 6), *shape, dtype=torch.float64)
    return list(drawn[RANK, :count])


def train(
    model: nn.parallel.DistributedDataParallel,
    inputs: list[Tensor],
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
    **how: bool,
) -> list[dict[str, Tensor | None]]:
    """Train until the inputs of all ranks are used up; return each step's gradients."""
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(**how):
        for x in inputs:
            optimizer.zero_grad()
            loss(model, x).backward()
            seen.append(
                {n: None if g is None else g.clone() for n, g in gradients_of(model).items()}
            )
            optimizer.step()
    return seen


def assert_same_training(ours: DDP, theirs: TorchDDP, seen: list, expected: list) -> None:
    with together():
        assert len(seen) == len(expected)
        for gradients, truth in zip(seen, expected, strict=True):
            assert_gradients_close(gradients, truth, 4)
        parameters = dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters():
            assert_close(parameter, parameters[name], name, 10)
    assert_same_bits(ours.named_parameters())


@pytest.mark.essential(keep=4)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("static", [True, False], ids=["initial size", "remaining size"])
@pytest.mark.parametrize("counts", COUNTS)
def test_gradients_and_final_model(counts, static, views, gloo):
    pair = wrap_both(mlp(3, 5, 4, 2), gloo, gradient_as_bucket_view=views, bucket_cap_mb=1e-4)
    inputs = batches(COUNTS[counts](RANK), 2, 3)
    seen, expected = (train(m, inputs, divide_by_initial_world_size=static) for m in pair)
    assert_same_training(*pair, seen, expected)
    # The next epoch begins with all ranks again.
    seen, expected = (train(m, inputs, divide_by_initial_world_size=static) for m in pair)
    assert_same_training(*pair, seen, expected)


@WAYS
@pytest.mark.parametrize("static", [True, False], ids=["initial size", "remaining size"])
def test_divisor(static, transport, views):
    """The same number on every rank, whoever of them writes the mean."""
    model = GivenGradients(a=torch.zeros(3), b=torch.zeros(1 << 18, dtype=torch.bfloat16))
    wrapped = DDP(model, gradient_as_bucket_view=views, transport=transport, bucket_cap_mb=1e-3)
    with wrapped.join(divide_by_initial_world_size=static):
        for step in range(1 + 2 * RANK):
            wrapped.zero_grad()
            ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
            wrapped(ones).backward()
            # Rank r ends after 1 + 2 r steps.
            active = SIZE - (step + 1) // 2
            mean = active / (SIZE if static else active)
            for parameter in model.parameters():
                expected = torch.full_like(parameter, mean)
                assert torch.equal(parameter.grad, expected), (step, parameter.grad)
    # And the whole group again, without join.
    wrapped.zero_grad()
    wrapped({name: torch.ones_like(p) for name, p in model.named_parameters()}).backward()
    with together():
        assert model.a.grad.tolist() == [1.0] * 3


def test_gradients_of_a_rank_that_has_joined_stay(views):
    """See also the test of ZeroRedundancyOptimizer, which reads them in the same Join."""
    model = mlp(3, 4, 2)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    inputs = batches(1 + 2 * RANK, 2, 3)
    kept: dict[str, str] = {}
    with wrapped.join():
        for x in inputs:
            wrapped.zero_grad()
            loss_of(wrapped, x).backward()
            kept = all_bits(gradients_of(model).items())
    with together():
        assert all_bits(gradients_of(model).items()) == kept


def test_throw_on_early_termination(gloo):
    for model in wrap_both(mlp(3, 4, 2), gloo):
        before = copy.deepcopy(model.module)
        inputs = batches(2 + 2 * (RANK == SIZE - 1), 2, 3)
        with together(), pytest.raises(RuntimeError) as caught:
            train(model, inputs, throw_on_early_termination=True)
        with together():
            assert model.module[0].weight.ne(before[0].weight).any()
            said = "Detected at least one rank" if RANK == SIZE - 1 else "exhausted all inputs"
            assert said in str(caught.value)


def test_not_enabled(gloo):
    pair = wrap_both(mlp(3, 4, 2), gloo)
    inputs = batches(2, 2, 3)
    seen, expected = (train(model, inputs, enable=False) for model in pair)
    assert_same_training(*pair, seen, expected)


class _Branches(nn.Module):
    """Two layers, of which a batch uses one or both, by the sign of its first element."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(3, 4)
        self.heads = nn.ModuleList([mlp(4, 2), mlp(4, 2), mlp(4, 2)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        z: Tensor = self.heads[0](y)
        return z if x[0, 0] > 0 else z + self.heads[1](y)


@pytest.mark.parametrize("counts", ["rank 0 ends first", "rank 0 has none"])
def test_unused_parameters(counts, views, gloo):
    """What no rank with inputs uses stays None; the last head is never used.

    torch's class gives zeros there once a rank has joined: that rank adds up in its own map what
    all ranks used before.
    """
    pair = wrap_both(
        _Branches(),
        gloo,
        find_unused_parameters=True,
        gradient_as_bucket_view=views,
        bucket_cap_mb=1e-4,
    )
    inputs = batches(COUNTS[counts](RANK), 2, 3)
    for x in inputs[-1:]:
        x.abs_()  # uses head 0 only
    seen, expected = (train(model, inputs) for model in pair)
    for gradients, truth in zip(seen, expected, strict=True):
        for name, gradient in gradients.items():
            if gradient is None and truth[name] is not None and not truth[name].any():
                truth[name] = None
    assert_same_training(*pair, seen, expected)
    with together():
        assert all(gradients["heads.2.0.bias"] is None for gradients in seen)
        if counts == "rank 0 ends first" and RANK == SIZE - 1:  # the only rank that is left
            assert seen[-1]["heads.1.0.bias"] is None


def test_missing_gradient_is_an_error_on_all_ranks():
    """Also on those that have joined: nobody is left waiting."""
    model = GivenGradients(a=torch.zeros(2), lost=torch.zeros(3))
    wrapped = DDP(model)

    def run() -> None:
        with wrapped.join():
            for step in range(4 * RANK):
                names = "a" if step and RANK == SIZE - 1 else ("a", "lost")
                wrapped({n: torch.ones_like(model.get_parameter(n)) for n in names}).backward()

    with together(), pytest.raises(RuntimeError) as caught:
        run()
    with together():
        assert f"'lost' of shape (3,), bucket 0, on rank {SIZE - 1}" in str(caught.value)
    # Apart from the lines on what each rank itself has missed.
    text = str(caught.value)
    assert len(set(gather(text[text.index("These parameters") :]))) == 1


@pytest.mark.parametrize("counts", ["rank 0 ends first", "rank 0 ends last"])
def test_accumulation_under_no_sync(counts, views, gloo):
    pair = wrap_both(mlp(3, 4, 2), gloo, gradient_as_bucket_view=views)
    inputs = batches(2 * COUNTS[counts](RANK), 2, 3)
    seen: list[list[dict[str, Tensor | None]]] = []
    for model in pair:
        seen.append([])
        with model.join():
            for step, x in enumerate(inputs):
                if step % 2:
                    loss_of(model, x).backward()
                else:
                    model.zero_grad()
                    with model.no_sync():
                        loss_of(model, x).backward()
                seen[-1].append(
                    {n: None if g is None else g.clone() for n, g in gradients_of(model).items()}
                )
    assert_same_training(*pair, *seen)


def test_accumulated_before_joining_and_unused_after(views, gloo):
    """What a rank accumulated counts in the first backward after join(), used there or not."""
    pair = wrap_both(_Branches(), gloo, find_unused_parameters=True, gradient_as_bucket_view=views)
    inputs = batches(2 + RANK, 2, 3)
    for model in pair:
        with model.join():
            for step, x in enumerate(inputs):
                x = x.abs() * (-1 if step == 1 else 1)  # only the second batch uses head 1
                if step == 1:
                    with model.no_sync():
                        loss_of(model, x).backward()
                else:
                    loss_of(model, x).backward()
        loss_of(model, inputs[0].abs()).backward()
    if SIZE == 2:
        # With more, torch's joined ranks also add up in their own map what others used.
        with together():
            assert_gradients_close(*map(gradients_of, pair))
    assert_same_bits((n, p.grad) for n, p in pair[0].named_parameters())


class _Counting(nn.Module):
    """Changes its buffers in each rank's own way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp(3, 2)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        self.seen += RANK + 1
        y: Tensor = self.layer(x)
        return y


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("synchronise", [True, False], ids=["synchronised", "local"])
@pytest.mark.parametrize("counts", ["rank 0 ends first", "rank 0 ends last"])
def test_buffers(counts, synchronise, gloo):
    """They come from the last rank that has inputs, and in the end from the last to join."""
    pair = wrap_both(_Counting(), gloo, forward_sync_buffers=synchronise)
    inputs = batches(COUNTS[counts](RANK), 2, 3)
    seen, expected = (train(model, inputs) for model in pair)
    assert_same_training(*pair, seen, expected)
    with together():
        assert torch.equal(pair[0].module.seen, pair[1].module.seen)


def averaging_hook() -> Callable[..., object]:
    """Return what no hook does, in Python: torch's own is recognised and done without."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return lambda group, bucket: default_hooks.allreduce_hook(group, bucket)


@pytest.mark.parametrize("hook", [False, True], ids=["no hook", "hook in Python"])
def test_sparse_gradients(hook, gloo):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 3, sparse=True, dtype=torch.float64)
            self.layer = mlp(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(self.embedding(x))
            return y

    pair = wrap_both(Model(), gloo)
    if hook:
        for model, group in zip(pair, (dist.group.WORLD, gloo), strict=True):
            model.register_comm_hook(group, averaging_hook())
    inputs = list(torch.randint(9, (SIZE, 2 * SIZE, 4))[RANK, : 2 + RANK])
    with together():
        assert len(inputs) == 2 + RANK
    for model in pair:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for x in inputs:
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
    with together():
        for name, parameter in pair[0].module.named_parameters():
            assert_close(parameter, pair[1].module.get_parameter(name), name, 4)


def test_static_graph(views, gloo):
    pair = wrap_both(mlp(3, 5, 4, 2), gloo, gradient_as_bucket_view=views, static_graph=True)
    inputs = batches(2 + RANK, 2, 3)
    for model in pair:
        loss_of(model, torch.ones(2, 3, dtype=torch.float64)).backward()
    seen, expected = (train(model, inputs) for model in pair)
    assert_same_training(*pair, seen, expected)


def train_two(models: tuple[nn.Module, nn.Module], inputs: list[Tensor], how: str) -> None:
    """Train two models in one Join, the backwards after each forward or both at the end."""
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    with Join(list(models), divide_by_initial_world_size="initial" in how):
        for x in inputs:
            optimizer.zero_grad()
            if "together" in how:
                (loss_of(models[0], x) + loss_of(models[1], x)).backward()
            else:
                for model in models:
                    loss_of(model, x).backward()
            optimizer.step()


@pytest.mark.parametrize("how", ["initial size", "remaining size"])
def test_two_models(how, gloo):
    """One Join for two; torch divides by the ranks that remain in the first alone."""
    first = wrap_both(mlp(3, 4, 2), gloo)
    second = wrap_both(_Branches(), gloo, find_unused_parameters=True)
    inputs = batches(2 + RANK, 2, 3)
    for models in zip(first, second, strict=True):
        train_two(models, inputs, how)
    for ours, theirs in (first, second):
        assert_same_training(ours, theirs, [], [])


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("how", ["initial size together", "remaining size together"])
@WAYS
def test_two_models_in_one_backward(transport, how, views):
    """Both forwards, then one backward: on Gloo torch's class gets out of step here."""
    options = {"transport": transport, "gradient_as_bucket_view": views}
    modules = (mlp(3, 4, 2), nn.Sequential(mlp(3, 5, 2), nn.BatchNorm1d(2).double()))
    inputs = batches(2 + RANK, 2, 3)
    results = []
    for order in (how, how.removesuffix(" together")):
        models = tuple(DDP(copy.deepcopy(module), **options) for module in modules)
        train_two(models, inputs, order)
        results.append([all_bits(model.state_dict().items()) for model in models])
        for model in models:
            assert_same_bits(model.state_dict().items())
    with together():
        assert results[0] == results[1]


def test_two_groups_are_refused(gloo):
    pair = wrap_both(mlp(3, 2), gloo)
    with together(), pytest.raises(ValueError, match="multiple process groups"):
        Join(list(pair))


def test_compression(gloo):
    """Joined ranks send zeros of the dtype that travels."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    pair = wrap_both(mlp(3, 4, 2, dtype=torch.float32), gloo, gradient_as_bucket_view=True)
    for model in pair:
        model.register_comm_hook(None, fp16_compress_hook)
    inputs = [x.float() for x in batches(2 + RANK, 2, 3)]
    for model in pair:
        train(model, inputs)
    with together():
        for name, parameter in pair[0].named_parameters():
            theirs = dict(pair[1].named_parameters())[name]
            assert_close(parameter, theirs, name, rounding=5e-3)
    assert_same_bits(pair[0].named_parameters())


@pytest.mark.parametrize("name", ["allreduce", "powerSGD"])
def test_hook_in_python(name, views, gloo):
    """Joined ranks call the hook with zeros."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    pair = wrap_both(mlp(3, 4, 2), gloo, gradient_as_bucket_view=views)
    for model, group in zip(pair, (dist.group.WORLD, gloo), strict=True):
        if name == "allreduce":
            model.register_comm_hook(group, averaging_hook())
        else:
            state = powerSGD_hook.PowerSGDState(
                group, matrix_approximation_rank=1, start_powerSGD_iter=2
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    inputs = batches(2 + RANK, 2, 3)
    seen, expected = (train(model, inputs) for model in pair)
    assert_same_training(*pair, seen, expected)


@pytest.mark.essential
def test_attributes(gloo):
    ours, theirs = wrap_both(mlp(3, 2), gloo)
    with together():
        assert ours.join_device == theirs.join_device == torch.device("cpu")
        assert ours.join_process_group is dist.group.WORLD
        assert isinstance(ours.join(), Join)
        assert type(ours.join_hook()) is type(theirs.join_hook())
        assert ours._get_ddp_logging_data()["join_uneven_inputs"] == 1

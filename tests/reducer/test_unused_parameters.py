"""Parameters without a gradient: untouched if unused everywhere, else the mean, or an error."""

import pytest
import torch
from models import GivenGradients, mlp
from replicas import (
    RANK,
    SIZE,
    assert_replicated,
    bits,
    gather,
    together,
)
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]

# Each parameter alone in its bucket, or all in one.
CAPS = pytest.mark.parametrize("cap", [1e-6, 25], ids=["small buckets", "one bucket"])


def ones(model: GivenGradients, names: str, factor: float = 1) -> dict[str, Tensor]:
    """Return gradients of ones for some parameters."""
    return {name: torch.full_like(model.get_parameter(name).detach(), factor) for name in names}


def assert_gradient(model: nn.Module, name: str, value: float | None) -> None:
    gradient = model.get_parameter(name).grad
    if value is None:
        assert gradient is None, f"{name}: {gradient}"
    else:
        assert gradient is not None, f"{name} has no gradient"
        expected = torch.full_like(gradient, value)
        assert torch.equal(gradient, expected), f"{name}: {gradient}, not {value}"


@pytest.mark.essential(keep=2)
@CAPS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unused_on_every_rank(dtype, cap, views):
    """None stays None, and a gradient from before keeps its bits, in every bucket."""
    model = GivenGradients(**{name: torch.zeros(3, dtype=dtype) for name in "abcd"})
    wrapped = DDP(
        model, find_unused_parameters=True, gradient_as_bucket_view=views, bucket_cap_mb=cap
    )
    wrapped(ones(model, "ac", RANK)).backward()
    mean = torch.full((3,), (SIZE - 1) / 2).to(dtype)
    with together():
        for name in "ac":
            assert torch.equal(model.get_parameter(name).grad, mean)
        assert_gradient(model, "b", None)
        assert_gradient(model, "d", None)
    # From now on c is unused, with an old gradient, and b with one that the user set; both
    # with bits that no arithmetic gives back.
    odd = torch.tensor([float("nan"), -0.0, 1e-7], dtype=dtype)
    for _ in range(3):
        model.a.grad = None
        model.b.grad = odd.clone() * (1 if RANK else -1)
        with torch.no_grad():
            model.c.grad.copy_(odd).mul_(RANK + 1)
        before = {name: bits(model.get_parameter(name).grad) for name in "bc"}
        wrapped(ones(model, "a")).backward()
        with together():
            assert_gradient(model, "a", 1)
            assert_gradient(model, "d", None)
            assert {name: bits(model.get_parameter(name).grad) for name in "bc"} == before


@pytest.mark.essential(keep=2)
@pytest.mark.smoke(keep=1)
@CAPS
@pytest.mark.mpi(min_size=2)
def test_unused_on_some_ranks(cap, views):
    """Who got no gradient counts as zero, and gets the mean too."""
    model = GivenGradients(**{name: torch.zeros(3) for name in "abcd"})
    wrapped = DDP(
        model, find_unused_parameters=True, gradient_as_bucket_view=views, bucket_cap_mb=cap
    )
    for step in range(4):
        wrapped.zero_grad(set_to_none=step != 2)
        # All use a; rank 0 alone b; the last rank alone c; d is used by none.
        names = "a" + ("b" if RANK == 0 else "") + ("c" if RANK == SIZE - 1 else "")
        wrapped(ones(model, names, step + 1)).backward()
        with together():
            assert_gradient(model, "a", step + 1)
            expected = (torch.tensor(step + 1.0) / SIZE).item()
            assert_gradient(model, "b", expected)
            assert_gradient(model, "c", expected)
            assert_gradient(model, "d", None)
        assert_replicated(wrapped)


@pytest.mark.mpi(min_size=2)
def test_used_by_different_ranks_at_each_step(views):
    model = GivenGradients(**{name: torch.zeros(2, 3) for name in "abcdef"})
    wrapped = DDP(
        model, find_unused_parameters=True, gradient_as_bucket_view=views, bucket_cap_mb=5e-5
    )
    generator = torch.Generator().manual_seed(8)
    for _ in range(10):
        used = torch.rand(SIZE, 6, generator=generator) < 0.5
        used[:, 0] = True
        wrapped.zero_grad()
        names = [name for name, own in zip("abcdef", used[RANK].tolist(), strict=True) if own]
        wrapped(ones(model, names, RANK + 1)).backward()
        weights = torch.arange(1.0, SIZE + 1).unsqueeze(1)
        with together():
            for column, name in enumerate("abcdef"):
                total = (weights * used)[:, column].sum()
                mean = (total / SIZE).item() if used[:, column].any() else None
                assert_gradient(model, name, mean)
        assert_replicated(wrapped)


@pytest.mark.mpi(min_size=2)
def test_old_gradient_of_a_rank_that_does_not_use_it(views):
    """What a rank accumulated before is part of the mean, as if its new gradient were zero."""
    model = GivenGradients(a=torch.zeros(2), b=torch.zeros(2))
    wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    for _ in range(2):
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(ones(model, "ab", 6 * SIZE)).backward()
        wrapped(ones(model, "ab" if RANK == 0 else "a", SIZE)).backward()
        with together():
            assert_gradient(model, "a", 7 * SIZE)
            assert_gradient(model, "b", 6 * SIZE + 1)
        assert_replicated(wrapped)


@pytest.mark.mpi
def test_used_only_under_no_sync(views):
    """A parameter that only the steps without reduction used is averaged with the others."""
    model = GivenGradients(a=torch.zeros(2), b=torch.zeros(2), c=torch.zeros(2))
    wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    for _ in range(2):
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(ones(model, "ab" if RANK == 0 else "a", SIZE)).backward()
        wrapped(ones(model, "a")).backward()
        with together():
            assert_gradient(model, "a", SIZE + 1)
            assert_gradient(model, "b", 1)
            assert_gradient(model, "c", None)
        assert_replicated(wrapped)


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(3, 4)
        self.heads = nn.ModuleList([mlp(4, 2), mlp(4, 2)])

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.body(x)
        return [head(y) for head in self.heads]


def test_outputs_that_take_no_part_in_the_loss(views):
    model = _Heads()
    wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    x = torch.randn(2, 3, dtype=torch.float64) + RANK
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(x)[0].square().sum().backward()
        with together():
            assert all(parameter.grad is None for parameter in model.heads[1].parameters())
            assert all(parameter.grad is not None for parameter in model.heads[0].parameters())
        assert_replicated(wrapped)


@pytest.mark.parametrize("idle", [0, 1])
@pytest.mark.parametrize("kept", [False, True], ids=["new", "kept"])
def test_outputs_that_take_no_part_leave_old_gradients(kept, idle, views):
    """Whether the old gradient was set by the user, or is where the last step has put it."""
    model = _Heads()
    wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    x = torch.randn(2, 3, dtype=torch.float64) + RANK
    old = {id(p): torch.full_like(p, RANK + 0.5) for p in model.heads[idle].parameters()}
    for step in range(4):
        if step == 0 or not kept:
            for parameter in model.heads[idle].parameters():
                parameter.grad = old[id(parameter)].clone()
        # The gradients of the other head are added to in place.
        wrapped(x)[1 - idle].square().sum().backward()
        with together():
            for parameter in model.heads[idle].parameters():
                assert torch.equal(parameter.grad, old[id(parameter)]), f"in step {step}"


@pytest.mark.mpi(min_size=2)
def test_output_that_takes_part_on_one_rank(views):
    model = _Heads()
    wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    x = torch.ones(2, 3, dtype=torch.float64)
    for _ in range(3):
        wrapped.zero_grad()
        outputs = wrapped(x)
        (outputs[0].sum() + (SIZE * outputs[1].sum() if RANK == SIZE - 1 else 0)).backward()
        with together():
            assert_gradient(model, "heads.0.0.bias", 2)
            assert_gradient(model, "heads.1.0.bias", 2)
        assert_replicated(wrapped)


class _GradientForOneOfTwo(torch.autograd.Function):
    """Gives its second input no gradient, though it takes part."""

    @staticmethod
    def forward(ctx, a, b, coefficient):
        ctx.save_for_backward(coefficient)
        return (a + b).sum()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0] * gradient, None, None


def test_function_that_gives_no_gradient(views):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(3))
            self.b = nn.Parameter(torch.zeros(3))

        def forward(self, coefficient: Tensor) -> Tensor:
            total: Tensor = _GradientForOneOfTwo.apply(self.a, self.b, coefficient)
            return total

    model = Model()
    wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.full((3,), float(RANK))).backward()
        with together():
            assert_gradient(model, "a", (SIZE - 1) / 2)
            assert_gradient(model, "b", None)


class _PassesThrough(nn.Module):
    """Returns its input, through a layer only on ranks that use it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp(3, 3)

    def forward(self, x: Tensor, used: bool) -> Tensor:
        y: Tensor = self.layer(x) if used else x
        return y


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("user", [0, 1])
def test_rank_that_uses_no_parameter_at_all(user, views):
    """Backward of such a rank meets no parameter, yet it takes part in the reduction."""
    model = _PassesThrough()
    wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    for _ in range(3):
        wrapped.zero_grad()
        x = torch.ones(SIZE, 3, dtype=torch.float64, requires_grad=True)
        (wrapped(x * 1, user == RANK) * 1).sum().backward()
        with together():
            assert_gradient(model, "layer.0.bias", 1)
            assert x.grad is not None
        assert_replicated(wrapped)


def test_no_hook_is_left_on_tensors_that_pass_through():
    """An output that is a parameter, or a tensor of the user, lives on: nothing may pile up."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.p, x

    model = Model()
    wrapped = DDP(model, find_unused_parameters=True)
    own = torch.ones(3, requires_grad=True)
    for _ in range(3):
        wrapped.zero_grad()
        p, x = wrapped(own)
        ((RANK + 1) * (p * x)).sum().backward()
        with together():
            assert_gradient(model, "p", (SIZE + 1) / 2)
    with together():
        assert own.grad.tolist() == [3 * (RANK + 1)] * 3
        assert not own._backward_hooks
        assert not model.p._backward_hooks


def test_all_used_costs_nothing(views):
    """With find_unused_parameters and nothing unused, the gradients are those without it."""
    model = GivenGradients(a=torch.zeros(2), b=torch.zeros(2))
    wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(ones(model, "ab", step + RANK)).backward()
        with together():
            assert_gradient(model, "a", step + (SIZE - 1) / 2)
            assert_gradient(model, "b", step + (SIZE - 1) / 2)


class TestError:
    """Without find_unused_parameters the next forward fails on all ranks."""

    def error_of(self, wrapped: DDP, given: dict[str, Tensor]) -> str:
        with together(), pytest.raises(RuntimeError) as caught:
            wrapped(given)
        return str(caught.value)

    def test_means_are_right_before_the_error(self, views):
        model = GivenGradients(a=torch.zeros(2), b=torch.zeros(3), c=torch.zeros(4))
        wrapped = DDP(model, gradient_as_bucket_view=views)
        wrapped(ones(model, "abc" if RANK == 0 else "a", SIZE)).backward()
        with together():
            assert_gradient(model, "a", SIZE)
            assert_gradient(model, "b", 1)
            assert_gradient(model, "c", 1)
        assert_replicated(wrapped)

    @pytest.mark.essential(keep=1)
    @pytest.mark.smoke(keep=1)
    @pytest.mark.mpi(min_size=2)
    def test_names_parameters_shapes_and_ranks(self, views):
        model = GivenGradients(
            used=torch.zeros(2), lost=torch.zeros(3, 7), never=torch.zeros(5), kept=torch.zeros(6)
        )
        wrapped = DDP(model, gradient_as_bucket_view=views, bucket_cap_mb=5e-5)
        given = ones(model, ["used", "kept"] + (["lost"] if RANK == 0 else []))
        for _ in range(2):  # before and after buckets are rebuilt
            buckets = {
                list(dict(model.named_parameters()))[index]: bucket.index
                for bucket in wrapped.reducer.buckets
                for index in bucket.parameter_indices
            }
            wrapped(given).backward()
            text = self.error_of(wrapped, given)
            with together():
                missing_lost = (
                    "rank 1" if SIZE == 2 else "ranks " + ", ".join(map(str, range(1, SIZE)))
                )
                everywhere = "ranks " + ", ".join(map(str, range(SIZE)))
                lost = next(part for part in text.split(";") if "'lost'" in part)
                assert "(3, 7)" in lost
                assert f"bucket {buckets['lost']}, on {missing_lost}" in lost
                never = next(part for part in text.split(";") if "'never'" in part)
                assert "(5,)" in never
                assert everywhere in never
                assert "'used'" not in text
                assert "'kept'" not in text
                assert "find_unused_parameters=True" in text
            # Apart from the lines on what each rank itself has missed.
            assert len(set(gather(text[text.index("These parameters") :]))) == 1
            # The error is raised once: who catches it can go on.
            wrapped.zero_grad()
            complete = ones(model, ["used", "lost", "never", "kept"], RANK)
            wrapped(complete).backward()
            wrapped.zero_grad()
            wrapped(complete).backward()
            with together():
                assert_gradient(model, "lost", (SIZE - 1) / 2)
            wrapped.zero_grad()

    def test_a_world_of_one_is_told_too(self, views):
        model = GivenGradients(used=torch.zeros(2), never=torch.zeros(5))
        wrapped = DDP(model, gradient_as_bucket_view=views)
        wrapped(ones(model, ["used"])).backward()
        text = self.error_of(wrapped, ones(model, ["used"]))
        with together():
            assert "'never'" in text
            assert "'used'" not in text

    @pytest.mark.mpi(min_size=2)
    def test_in_a_submodule(self):
        model = nn.ModuleDict({"body": mlp(3, 2), "head": mlp(2, 2)})

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = model

            def forward(self, x: Tensor) -> Tensor:
                y = self.parts["body"](x)
                return y if RANK == SIZE - 1 else self.parts["head"](y)

        wrapped = DDP(Model())
        x = torch.randn(2, 3, dtype=torch.float64)
        wrapped(x).sum().backward()
        with together(), pytest.raises(RuntimeError) as caught:
            wrapped(x)
        with together():
            assert "'parts.head.0.weight'" in str(caught.value)
            assert "'parts.head.0.bias'" in str(caught.value)
            assert "body" not in str(caught.value)
            assert f"rank {SIZE - 1}" in str(caught.value)

    def test_no_error_while_gradients_are_accumulated(self, views):
        """Under no_sync nobody waits for gradients."""
        model = GivenGradients(a=torch.zeros(2), b=torch.zeros(3))
        wrapped = DDP(model, gradient_as_bucket_view=views)
        with wrapped.no_sync():
            wrapped(ones(model, "a")).backward()
            wrapped(ones(model, "b")).backward()
        wrapped(ones(model, "ab")).backward()
        wrapped.zero_grad()
        wrapped(ones(model, "ab")).backward()
        with together():
            assert_gradient(model, "a", 1)


@pytest.mark.mpi(min_size=2)
def test_what_the_reducer_tells_of_used_parameters():
    """How many ranks used each in the last backward, and whether they are always the same."""
    model = GivenGradients(**{name: torch.zeros(3) for name in "abc"})
    wrapped = DDP(model, find_unused_parameters=True)
    for step in range(4):
        names = "ab" if step == 3 and RANK == 0 else "a"
        wrapped(ones(model, names)).backward()
        used = wrapped.reducer._get_local_used_map()
        with together():
            assert used.dtype is torch.int32
            assert used.tolist() == [SIZE, int(step == 3), 0]
            assert wrapped.reducer._ddp_graph_static() == (step < 3 or RANK > 0)

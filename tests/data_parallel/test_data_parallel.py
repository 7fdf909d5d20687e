"""DataParallel over ranks, beside the plain module on the whole batch.

Rank 0 checks; the other ranks serve it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpiddp import DataParallel

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(100), pytest.mark.sizes]

RANKS = MPI.COMM_WORLD.Get_size()
RANK = MPI.COMM_WORLD.Get_rank()


def lead(check: Callable[..., None], *nets: nn.Module, dim: int = 0) -> None:
    """Let rank 0 check wrapped modules while the others serve them."""
    models = [DataParallel(net, dim=dim) for net in nets]
    if models[0].serve():
        return
    try:
        check(*models)
    finally:
        for model in models:
            model.end_serving()


def net(width: int = 5) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(inplace=True), nn.Linear(width, 3))


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other)


def same_gradients(one: nn.Module, other: nn.Module) -> None:
    for mine, plain in zip(one.parameters(), other.parameters(), strict=True):
        same(mine.grad, plain.grad)


class Both(NamedTuple):
    total: torch.Tensor
    parts: dict[str, Any]


class Structured(nn.Module):
    """Takes and returns nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: Any, listed: list[Any], *, scale: Any, named: dict[str, Any]) -> Any:
        assert type(pair).__name__ == "Both"
        assert listed[1] == "text"
        total = self.linear(pair.total) * scale["factor"] + pair.parts["a"]
        return Both(total, {"b": [listed[0] * 2, None], "c": (named["x"] + 1,)})


@pytest.mark.smoke
def test_outputs_and_gradients() -> None:
    def check(model: DataParallel) -> None:
        plain = copy.deepcopy(model.module)
        assert isinstance(model, torch.nn.DataParallel)
        assert all(name.startswith("module.") for name in model.state_dict())
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
        for rows in (8, 7, RANKS, 2 * RANKS + 1):
            whole = torch.randn(rows, 6)
            ours, theirs = whole.clone().requires_grad_(), whole.clone().requires_grad_()
            output, expected = model(ours), plain(theirs)
            same(output, expected)
            for optimizer in optimizers:
                optimizer.zero_grad()
            output.square().sum().backward()
            expected.square().sum().backward()
            same(ours.grad, theirs.grad)
            same_gradients(model, plain)
            for optimizer in optimizers:
                optimizer.step()

    lead(check, net())


@pytest.mark.essential
def test_containers_keywords_and_what_is_no_tensor() -> None:
    def check(model: DataParallel) -> None:
        values = [torch.randn(7, 4, requires_grad=True) for _ in range(4)]
        gradients = []
        for module in (model, model.module):
            pair = Both(values[0], {"a": values[1]})
            output = module(pair, [values[2], "text"], scale={"factor": 3}, named={"x": values[3]})
            assert type(output) is Both
            assert output.parts["b"][1] is None
            leaves = [output.total, output.parts["b"][0], output.parts["c"][0]]
            loss = sum(leaf.square().sum() for leaf in leaves)
            gradients.append([*leaves, *torch.autograd.grad(loss, [*values, *model.parameters()])])
        same(*gradients)

    lead(check, Structured())


def test_another_dimension() -> None:
    def check(model: DataParallel) -> None:
        values = torch.randn(2, 5, 6, requires_grad=True)
        same(model(values), model.module(values))

    lead(check, net(), dim=1)


class Rank(nn.Module):
    """Returns which rank has computed it, and what holds there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.offset = 0.0

    def forward(self, values: torch.Tensor | None = None) -> torch.Tensor:
        product = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        facts = [
            MPI.COMM_WORLD.Get_rank(),
            self.training,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            product.dtype is torch.bfloat16,
            torch.get_default_dtype() is torch.float64,
            self.offset,
        ]
        rows = 1 if values is None else len(values)
        return self.weight.float() * torch.tensor([[float(fact) for fact in facts]] * rows)


def test_which_ranks_compute_and_what_holds_there() -> None:
    def check(model: DataParallel) -> None:
        ranks = lambda output: output[:, 0].int().tolist()  # noqa: E731
        for rows in (1, 2, RANKS, 5):
            chunks = torch.arange(rows).chunk(RANKS)
            expected = [rank for rank, chunk in enumerate(chunks) for _ in chunk]
            assert ranks(model(torch.ones(rows))) == expected
        assert ranks(model()) == [0]
        rows = torch.ones(RANKS)

        def facts() -> list[float]:
            output = model(rows)
            assert (output[:, 1:] == output[:1, 1:]).all()
            values: list[float] = output[0, 1:].tolist()
            return values

        assert facts() == [1, 1, 0, 0, 0, 0]
        model.eval()
        assert facts() == [0, 1, 0, 0, 0, 0]
        model.module.offset = 0.5
        with torch.no_grad():
            assert facts() == [0, 0, 0, 0, 0, 0.5]
        with torch.inference_mode():
            assert facts() == [0, 0, 1, 0, 0, 0.5]
        model.train()
        with torch.autocast("cpu", torch.bfloat16):
            assert facts() == [1, 1, 0, 1, 0, 0.5]
        torch.set_default_dtype(torch.float64)
        try:
            assert facts() == [1, 1, 0, 0, 1, 0.5]
        finally:
            torch.set_default_dtype(torch.float32)
        assert facts() == [1, 1, 0, 0, 0, 0.5]

    lead(check, Rank())


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.weight * values.sum()


def test_scalars_become_a_vector() -> None:
    def check(model: DataParallel) -> None:
        values = torch.arange(6.0)
        with pytest.warns(UserWarning, match="one element a rank"):
            losses = model(values)
        same(losses, torch.stack([part.sum() for part in values.chunk(RANKS)]))
        losses.sum().backward()
        same(model.module.weight.grad, values.sum())

    lead(check, Sum())


class Normalised(nn.Module):
    """Has buffers that a pass changes: one in place, one by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        before = torch.full((len(values), 1), self.seen.item())
        self.seen = self.seen + len(values)
        return torch.cat([self.norm(values), before], 1)


def test_buffers_are_those_of_the_first_replica() -> None:
    def check(model: DataParallel) -> None:
        first = copy.deepcopy(model.module)
        seen = 0
        for _ in range(3):
            values = torch.randn(3 * RANKS, 3)
            output = model(values)
            first(values[:3])
            same(model.module.state_dict(), first.state_dict())
            # The replicas begin with what rank 0 has.
            assert (output[:, 3] == seen).all()
            seen += 3
        for parts in zip(output.chunk(RANKS), values.chunk(RANKS), strict=True):
            same(parts[0][:, :3], nn.BatchNorm1d(3)(parts[1]))
        model.eval()
        same(model(values), first.eval()(values))

    lead(check, Normalised())


class Marked(nn.Module):
    """Marks in place, in a buffer, that it has seen a large value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mark", torch.zeros(1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        before = self.mark.clone()
        self.mark += (values > 9).sum()
        return before.expand(len(values))


def test_what_only_another_replica_does_to_a_buffer_is_lost() -> None:
    def check(model: DataParallel) -> None:
        values = torch.ones(RANKS)
        values[-1] = 10
        for _ in range(3):
            same(model(values), torch.zeros(RANKS))
        same(model(values.flip(0)), torch.zeros(RANKS))
        same(model(values), torch.ones(RANKS))

    lead(check, Marked())


@pytest.mark.essential
def test_random_numbers_differ_between_ranks_and_come_again() -> None:
    def check(model: DataParallel) -> None:
        ones = torch.ones(16 * RANKS, 1)
        before = torch.get_rng_state()
        nn.Dropout(0.5)(ones[:16])
        after_first_part = torch.get_rng_state()
        torch.set_rng_state(before)
        first = model(ones)
        # Rank 0 draws for its own part, and for nothing else.
        assert torch.equal(torch.get_rng_state(), after_first_part)
        second = model(ones)
        torch.set_rng_state(before)
        assert torch.equal(model(ones), first)
        assert torch.equal(model(ones), second)
        parts = [*first.chunk(RANKS), *second.chunk(RANKS)]
        assert len({tuple(part.flatten().tolist()) for part in parts}) == len(parts)
        leaf = torch.ones(16 * RANKS, 1, requires_grad=True)
        for reentrant in (True, False):
            # The second pass draws what the first one drew.
            output = checkpoint(model, leaf, use_reentrant=reentrant)
            (gradient,) = torch.autograd.grad(output.sum(), leaf) if not reentrant else (None,)
            if reentrant:
                output.sum().backward()
                gradient = leaf.grad
            assert torch.equal(gradient, output.detach())

    lead(check, nn.Dropout(0.5))


@pytest.mark.essential
def test_several_modules_and_passes_in_one_graph() -> None:
    def check(one: DataParallel, two: DataParallel) -> None:
        plain_one, plain_two = copy.deepcopy(one.module), copy.deepcopy(two.module)
        values = torch.randn(9, 6)
        losses = []
        for first, second in ((one, two), (plain_one, plain_two)):
            hidden = first(values)
            again = first(values * 2)
            third = second(torch.cat([hidden, again], 1))
            unused = second(values)  # its graph is given up
            loss = third[4:].square().sum() + again[:, :1].sum()
            loss.backward(retain_graph=True)
            loss.backward()
            losses.append(loss)
            del unused
        same(*losses)
        same_gradients(one, plain_one)
        same_gradients(two, plain_two)
        with pytest.raises(RuntimeError, match="second time"):
            losses[0].backward()
        # After that error everything goes on.
        loss = one(values).sum()
        first = torch.autograd.grad(loss, list(one.parameters()))
        same(first, torch.autograd.grad(plain_one(values).sum(), list(plain_one.parameters())))

    lead(check, net(), net(7))


def test_what_changes_between_passes() -> None:
    def check(model: DataParallel) -> None:
        values = torch.randn(7, 6)

        def compare() -> None:
            model.zero_grad()
            same(model(values), model.module(values))
            model(values).sum().backward()
            ours = [parameter.grad for parameter in model.parameters()]
            model.zero_grad()
            model.module(values).sum().backward()
            same(ours, [parameter.grad for parameter in model.parameters()])

        compare()
        model.module[0].weight.data.mul_(2)  # its version stays
        compare()
        model.module[2].requires_grad_(False)
        compare()
        model.module[2].requires_grad_(True)
        compare()
        model.load_state_dict({k: v * 3 for k, v in model.state_dict().items()})
        compare()
        model.module[2].bias = nn.Parameter(torch.randn(3))
        compare()
        model.module[1] = nn.Tanh()  # the module is sent
        compare()
        model.module[0] = nn.Linear(6, 4)
        model.module[2] = nn.Linear(4, 1, bias=False)
        compare()
        # A graph survives what happens to the parameters' flags after it.
        output = model(values)
        model.module[2].requires_grad_(False)
        model(values)
        output.sum().backward()

    lead(check, net())


class Faulty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, values: torch.Tensor, kind: str) -> torch.Tensor:
        if values.max() > 9:
            if kind == "key":
                raise KeyError("which")
            if kind == "exit":
                raise SystemExit(3)
            if kind == "backward":
                values = self.linear(values)
                values.register_hook(_fail)
                return values
        return self.linear(values)


def _fail(gradient: torch.Tensor) -> None:
    raise ArithmeticError("a hook fails")


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize(
    ("kind", "error"), [("key", KeyError), ("exit", RuntimeError), ("backward", ArithmeticError)]
)
def test_errors_of_a_replica(kind: str, error: type[Exception]) -> None:
    def check(model: DataParallel) -> None:
        good, bad = torch.ones(RANKS, 2), torch.ones(RANKS, 2)
        bad[-1] = 10
        plain = copy.deepcopy(model.module)
        for _ in range(2):
            with pytest.raises(error, match=f"on rank {RANKS - 1}, in ") as caught:
                model(bad, kind).sum().backward()
            assert "Traceback" in str(caught.value)
            assert '", line ' in str(caught.value)
            model.zero_grad()
            plain.zero_grad()
            model(good, kind).sum().backward()
            plain(good, kind).sum().backward()
            same_gradients(model, plain)
        # An error of rank 0's own part leaves the replies of the others.
        with pytest.raises(KeyError, match="which"):
            model(bad.flip(0), "key")
        same(model(good, kind), plain(good, kind))

    lead(check, Faulty())


def test_sparse_gradients_and_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4, sparse=True)
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            values: torch.Tensor = self.second(self.first(self.embedding(index)))
            return values

    def check(model: DataParallel) -> None:
        plain = copy.deepcopy(model.module)
        index = torch.randint(0, 10, (8,))
        for module in (model, plain):
            module(index).square().sum().backward()
        same(model.module.embedding.weight.grad.to_dense(), plain.embedding.weight.grad.to_dense())
        same(model.module.first.weight.grad, plain.first.weight.grad)

    lead(check, Tied())


def test_a_large_batch_of_many_layouts() -> None:
    """Tensors of their own messages, strides that are kept, and an empty one."""

    class Layout(nn.Module):
        def forward(self, images: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert empty.numel() == 0
            return images.transpose(1, 2)

    def check(model: DataParallel) -> None:
        images = torch.randn(8, 5, 30, 30).to(memory_format=torch.channels_last)
        same(model(images, torch.empty(8, 0)), images.transpose(1, 2))
        half = images.bfloat16()
        assert torch.equal(model(half, torch.empty(8, 0)), half.transpose(1, 2))

    lead(check, Layout())


@pytest.mark.smoke
def test_ranks_that_serve_return_and_serve_again() -> None:
    model = DataParallel(net())
    if RANK != 0:
        with pytest.raises(RuntimeError, match="only rank 0 calls it"):
            model(torch.ones(2, 6))
    elif RANKS > 1:
        same(model(torch.ones(4, 6)), model.module(torch.ones(4, 6)))
    served = model.serve()
    assert served == (RANK != 0)
    del model  # on rank 0 this lets the others return
    MPI.COMM_WORLD.Barrier()


def test_the_hooks_of_parameters_run_on_rank_0_only() -> None:
    module = net()
    module[0].weight.register_hook(lambda gradient: gradient * 2)
    original = module[0].weight

    def check(model: DataParallel) -> None:
        plain = net()
        values = torch.randn(6, 6)
        model(values).sum().backward()
        plain(values).sum().backward()
        same(model.module[0].weight.grad, plain[0].weight.grad * 2)

    lead(check, module)
    assert module[0].weight is original


def test_nothing_is_sent_that_has_not_changed() -> None:
    def check(model: DataParallel) -> None:
        values = torch.ones(RANKS, 6)
        model(values)
        known = vars(model)["_known"]
        assert known.compare(model.module) == (None, False)
        with torch.no_grad():
            model.module[2].bias.add_(1)
        change, new = known.compare(model.module)
        assert not new
        assert change.slots is None
        assert change.changed == [3]
        assert sum(end - begin for begin, end in change.runs) == 12
        known.forget()
        with warnings.catch_warnings():
            same(model(values), model.module(values))

    lead(check, net())

"""Collectives that autograd and torch.compile know, on our backend and on Gloo."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from replicas import RANK, SIZE, assert_close, gather, together
from torch import Tensor
from torch_versions import (
    functional_all_gather_single_autograd,
    functional_all_gather_single_coalesced,
    functional_reduce_scatter_single_autograd,
    functional_reduce_scatter_single_coalesced,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed.nn import functional as differentiable

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings(r"ignore:torch\.distributed\.nn\.functional\..* is deprecated"),
    # torch warns of operators of its own that pass gradients on without saying so.
    pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered"),
]

ROWS = 2 * SIZE

Group = dist.ProcessGroup
Operation = Callable[[Tensor, Group], Tensor]


def empties(count: int = SIZE) -> list[Tensor]:
    return [torch.zeros(ROWS, 3) for _ in range(count)]


# torch.distributed.nn.functional, by name.
DIFFERENTIABLE: dict[str, Operation] = {
    "broadcast": lambda x, group: differentiable.broadcast(x, SIZE - 1, group),
    "gather": lambda x, group: torch.stack(differentiable.gather(x, 0, group)),
    "scatter": lambda x, group: differentiable.scatter(
        [x * (rank + 1) for rank in range(SIZE)], 0, group
    ),
    # What it leaves on the others is nobody's business.
    "reduce": lambda x, group: differentiable.reduce(x * x, 0, group=group) * (RANK == 0),
    "reduce_scatter": lambda x, group: differentiable.reduce_scatter(
        torch.empty(ROWS, 3), [x * (rank + 1) for rank in range(SIZE)], group=group
    ),
    "all_gather": lambda x, group: torch.stack(differentiable.all_gather(x, group)),
    "all_to_all": lambda x, group: torch.stack(
        differentiable.all_to_all(empties(), [x * (rank + 1) for rank in range(SIZE)], group)
    ),
    "all_to_all_single": lambda x, group: differentiable.all_to_all_single(
        torch.empty_like(x), x.clone(), group=group
    ),
    "all_reduce": lambda x, group: differentiable.all_reduce(x * x, group=group),
}

# torch.distributed._functional_collectives, by name.
FUNCTIONAL: dict[str, Operation] = {
    "all_reduce": lambda x, group: functional.all_reduce(x * x, "sum", group),
    "all_reduce max": lambda x, group: functional.all_reduce(x, "max", group).detach(),
    "broadcast": lambda x, group: functional.broadcast(x, SIZE - 1, group).detach(),
    "all_gather_single": lambda x, group: functional_all_gather_single_autograd(x, 1, group),
    "reduce_scatter_single": lambda x, group: functional_reduce_scatter_single_autograd(
        x, "sum", 0, group
    ),
    "all_to_all_single": lambda x, group: functional.all_to_all_single_autograd(
        x, [2] * SIZE, [2] * SIZE, group
    ),
    "uneven all_to_all_single": lambda x, group: functional.all_to_all_single_autograd(
        x, uneven(RANK, received=True), uneven(RANK, received=False), group
    ),
    "all_reduce_coalesced": lambda x, group: torch.stack(
        functional.all_reduce_coalesced([x, x * x], "sum", group)
    ),
    "all_gather_single_coalesced": lambda x, group: torch.stack(
        functional_all_gather_single_coalesced([x, x * x], group)
    ),
    "reduce_scatter_single_coalesced": lambda x, group: torch.stack(
        functional_reduce_scatter_single_coalesced([x, x * x], "sum", [0, 0], group)
    ),
    "permute_tensor": lambda x, group: functional.permute_tensor(
        x.detach().flatten(), [(rank + 1) % SIZE for rank in range(SIZE)], group
    ),
}


def uneven(rank: int, received: bool) -> list[int]:
    """Return how many rows `rank` gets from, or sends to, each: the first two differ by rank."""
    if SIZE == 1:
        return [2]
    sent = [[2] * SIZE for _ in range(SIZE)]
    for sender in sent:
        sender[0], sender[-1] = 1, 3
    return [row[rank] for row in sent] if received else sent[rank]


def result_and_gradient(operation: Operation, x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Run an operation and its backward from weights that tell elements and ranks apart."""
    leaf = x.clone().requires_grad_()
    result = operation(leaf, group)
    if not result.requires_grad:
        return functional.wait_tensor(result), torch.zeros(0)
    weights = torch.arange(1.0, result.numel() + 1).view(result.shape) / (RANK + 1)
    (result * weights).sum().backward()
    assert leaf.grad is not None
    return result.detach(), leaf.grad


def compare(operation: Operation, gloo: Group) -> None:
    world: Any = dist.group.WORLD
    for step in range(2):
        x = torch.arange(ROWS * 3.0).view(ROWS, 3) / 4 + RANK + step
        pairs = [result_and_gradient(operation, x, group) for group in (world, gloo)]
        with together():
            for name, own, other in zip(("result", "gradient"), *pairs, strict=True):
                assert_close(own, other, name)


@pytest.mark.essential(keep=3)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_differentiable(name, gloo):
    compare(DIFFERENTIABLE[name], gloo)


@pytest.mark.essential(keep=4)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional(name, gloo):
    compare(FUNCTIONAL[name], gloo)


def test_not_waited_for(gloo):
    """Results that nobody looks at; torch warns of those on its way out, if at all."""
    results = [functional.all_reduce(torch.full((4,), float(RANK)), "sum", dist.group.WORLD)]
    other = torch.ones(1)
    dist.all_reduce(other)
    with together():
        assert other.item() == SIZE
        assert results[0].tolist() == [sum(range(SIZE))] * 4


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def program(x: Tensor, group: Group) -> Tensor:
    """Use functional collectives, and torch.distributed's own where dynamo has one for them."""
    everyone = functional_all_gather_single_autograd(x.sin(), 0, group)
    mine = functional_reduce_scatter_single_autograd(everyone * 2, "sum", 0, group)
    swapped = functional.all_to_all_single_autograd(mine, [2] * SIZE, [2] * SIZE, group)
    return functional.all_reduce(swapped, "sum", group).cos() + mine


@pytest.mark.essential(keep=1)
@pytest.mark.once
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# Of torch 2.11's compiler, by itself.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiled_program(backend, gloo):
    """One graph without breaks, with the numbers of eager Gloo."""
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    world: Any = dist.group.WORLD
    x = torch.arange(ROWS * 3.0).view(ROWS, 3) / 4 + RANK
    own = result_and_gradient(compiled, x, world)
    expected = result_and_gradient(program, x, gloo)
    with together():
        for name, one, other in zip(("result", "gradient"), own, expected, strict=True):
            assert_close(one, other, name)


@pytest.mark.once
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_in_place_collectives(gloo):
    """torch.distributed's own functions inside of a graph: dynamo turns them into functional."""

    def step(x: Tensor, out: Tensor) -> Tensor:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(out, x)
        return out * 2

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    x = torch.full((2,), float(RANK))
    result = compiled(x, torch.empty(2 * SIZE))
    with together():
        assert x.tolist() == [sum(range(SIZE))] * 2
        assert result.tolist() == [2 * sum(range(SIZE))] * 2 * SIZE
    assert len(set(map(str, gather(result.tolist())))) == 1

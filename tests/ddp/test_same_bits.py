"""MPIDDP_DEBUG: every so many backward passes all ranks compare the bits of their parameters."""

import pytest
import torch
from replicas import RANK, SIZE, together

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes]


def step(model: DDP, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 30)).square().mean().backward()
    optimizer.step()


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("every", [1, 3])
def test_a_rank_that_goes_astray(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """All ranks raise at the next comparison, and name the parameter and the rank."""
    monkeypatch.setenv("MPIDDP_DEBUG", str(every))
    model = DDP(torch.nn.Sequential(torch.nn.Linear(30, 5), torch.nn.Linear(5, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    if RANK == SIZE - 1:
        with torch.no_grad():
            # Whatever its value is, by one bit.
            model.module[1].bias.view(torch.int32)[2] ^= 1
    with together():
        for number in range(1, every):
            step(model, optimizer)
            assert number < every
    with together(), pytest.raises(RuntimeError, match="do not have the same") as caught:
        step(model, optimizer)
    with together():
        caught.match(f"after {3 + every} reduced backward passes")
        caught.match(f"on rank {SIZE - 1} parameter '1.bias'")
        assert "0.weight" not in str(caught.value)


def test_one_element_of_any_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_DEBUG", "1")
    module = torch.nn.Linear(30, 1)
    module.bias = torch.nn.Parameter(torch.zeros(1, 2)[:, 0])
    assert module.bias.stride() == (2,)
    model = DDP(module)
    with together():
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_DEBUG", "0")
    model = DDP(torch.nn.Linear(30, 5), init_sync=False)
    with torch.no_grad():
        model.module.weight.fill_(RANK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with together():
        step(model, optimizer)


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_without_inputs(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """Within join() they do not step, so nothing is compared there; afterwards it is."""
    monkeypatch.setenv("MPIDDP_DEBUG", "1")
    model = DDP(torch.nn.Linear(30, 5), shared_parameters=shared)
    optimizer: torch.optim.Optimizer
    if shared:
        optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for _ in range(2 + RANK):
            step(model, optimizer)
    with together():
        step(model, optimizer)
    if not shared:
        with torch.no_grad():
            model.module.weight[0, RANK] += 1
        with together(), pytest.raises(RuntimeError, match="do not have the same parameters"):
            step(model, optimizer)

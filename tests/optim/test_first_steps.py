"""What an optimizer makes new in its first step is not in memory twice."""

import importlib
from pathlib import Path

import pytest
import torch
from replicas import SIZE, together
from torch import nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer, adopted, first_steps
from mpiddp.system import freed_memory

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes]


def private_bytes() -> int:
    """Return how much memory this process has of its own.

    What /proc/self/status says of it may be some MB old.
    """
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say it")


@pytest.mark.parametrize("models_before", range(4))
@pytest.mark.parametrize("kind", ["NodeOptimizer", "adopted"])
def test_state_moves_in_portions(
    kind: str, models_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the C library's heap is full of holes, as models before this one leave it."""
    adopted.install()
    monkeypatch.setattr(first_steps, "PORTION_BYTES", 1 << 20)
    torch.manual_seed(0)
    width = 1 << 11
    model = DDP(nn.Sequential(*(nn.Linear(width, width) for _ in range(3))), shared_parameters=True)
    most = 0
    module = importlib.import_module("torch.optim.adam")  # AdamW is one
    step = module.adam

    def noting(*args: object, **kwargs: object) -> None:
        nonlocal most
        step(*args, **kwargs)
        most = max(most, private_bytes())

    monkeypatch.setattr(module, "adam", noting)
    settings = {"lr": 1e-3, "foreach": False}
    if kind == "adopted":
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    else:
        optimizer = NodeOptimizer(model, torch.optim.AdamW, **settings)
    torch.ones(30 << 18)  # once it is freed, smaller tensors come from that heap
    model(torch.ones(1, width)).sum().backward()
    freed_memory.give_back()  # else what backward has freed counts, which is now more, now less
    most, before = 0, private_bytes()  # the optimizer has tried some steps when it was made
    optimizer.step()
    state = 2 * sum(p.nbytes for p in model.parameters()) // SIZE
    with together():
        assert 0 < most < before + state / 3

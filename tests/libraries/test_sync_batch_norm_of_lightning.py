"""Lightning's `sync_batchnorm` under `python -m mpiddp`: on CPUs, and right."""

import pytest
import torch
from script_runs import SCRIPTS, by_rank, launch
from torch import nn

pytestmark = pytest.mark.timeout(180)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_statistics_of_the_whole_batch(ranks: int) -> None:
    done = launch(SCRIPTS / "sync_batch_norm.py", ranks=ranks)
    assert done.returncode == 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    batch = torch.randn(4 * ranks, 3, dtype=torch.float64)
    losses = []
    for _ in range(3):
        model.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        losses.append(loss.item())
    found = by_rank(done.stdout)
    assert sorted(found) == list(range(ranks))
    for row in found.values():
        assert row["kind"] == "mpiddp"
        assert row["losses"] == pytest.approx(losses)
        assert row["mean"] == pytest.approx(model[1].running_mean.tolist())

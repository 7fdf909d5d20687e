"""A HorovodInternalError under hvd.elastic.run: all go back to the last commit, and go on."""

import json

import pytest
import torch
from elastic_runs import OPEN_MPI, start

pytestmark = pytest.mark.timeout(150)

LOSSY = [False, pytest.param(True, marks=pytest.mark.skipif(not OPEN_MPI, reason="no ULFM"))]


def undisturbed(steps: int) -> "list[float]":
    """Return the losses of horovod_errors.py in one process."""
    torch.manual_seed(0)  # of rank 0, whose state all take
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        loss = (model(torch.randn(8, 4, generator=generator).double()) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("lossy", LOSSY)
@pytest.mark.parametrize(
    ("how", "words", "step"),
    [
        ("one", "HorovodInternalError: ", 2),
        ("all", "HorovodInternalError: a link is down", 2),
        ("mismatch", "HorovodInternalError: the ranks differ in the shape of allreduce", 2),
        ("hosts", "HostsUpdatedInterrupt: ", 3),
    ],
)
def test_all_go_back_and_go_on(how: str, words: str, step: int, lossy: bool) -> None:
    """What is learned is what nothing has disturbed; the callbacks are called once."""
    done = start(2, "horovod_errors.py", how, lossy=lossy)
    assert done.returncode == 0
    ended = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(each["rank"] for each in ended) == [0, 1]
    for each in ended:
        assert each["began"] == [[2, 0], [2, step]]
        assert each["resets"] == [2]
        assert each["total"] == 2
        assert each["losses"] == pytest.approx(undisturbed(6), rel=1e-9)
    assert done.stderr.count(f"mpiddp: rank 0: {words}") == 1

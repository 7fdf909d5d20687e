"""Run scripts that train under mpiddp.elastic, and read what their ranks say."""

import json
import subprocess
from collections.abc import Sequence

import mpirun
import pytest
import torch
from script_runs import SCRIPTS

import mpiddp

OPEN_MPI = mpiddp.compiled_against()[0] == "Open MPI"
needs_ulfm = pytest.mark.skipif(not OPEN_MPI, reason="only Open MPI goes on without a rank")


def start(
    ranks: int, script: str, *arguments: str, limit: float = 100, lossy: bool = True, **env: str
) -> "subprocess.CompletedProcess[str]":
    """Run a script to its end; if `lossy`, so that ranks may be lost, where the MPI can."""
    options = ["--with-ft", "ulfm", "--mca", "btl", "self,tcp"] if OPEN_MPI and lossy else []
    python = [mpirun.sys.executable, str(SCRIPTS / script), *arguments]
    command = [mpirun.find(), *options, "-n", str(ranks), *python]
    done = mpirun.run_command(command, timeout=limit, env=env)
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    return done


def train(
    ranks: int, steps: int, *arguments: str, limit: float = 100, **env: str
) -> "subprocess.CompletedProcess[str]":
    """Run elastic_training.py."""
    return start(ranks, "elastic_training.py", str(steps), *arguments, limit=limit, **env)


def said(done: "subprocess.CompletedProcess[str]") -> "list[dict]":
    """Return what the ranks said that came to the end, if all have the same bits."""
    ended = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len({each["bits"] for each in ended}) == 1
    return sorted(ended, key=lambda each: each["rank"])


def learned(worlds: Sequence[Sequence[int]], steps: int) -> float:
    """Return the loss of elastic_training.py's steps, without a loss of ranks and without MPI.

    Args:
        worlds: numbers of ranks, and the step from which there are so many.
        steps: how many there are.
    """
    torch.manual_seed(1)  # of rank 0, which has given the others its state
    double = {"dtype": torch.float64}
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64, **double),
        torch.nn.BatchNorm1d(64, **double),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 1, **double),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(512, 32, generator=torch.Generator().manual_seed(0), **double)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - batch.sum(1, keepdim=True)).square().mean()

    step = epoch = consumed = 0
    for (ranks, _), (_, until) in zip(worlds, [*worlds[1:], (0, steps)], strict=True):
        before, batch = consumed, 0
        while step < until:
            order = torch.randperm(512, generator=torch.Generator().manual_seed(epoch)).tolist()
            rest = order[before:]
            each = -(-len(rest) // ranks)
            if batch * 8 >= each:
                before, batch, epoch = 0, 0, epoch + 1
                continue
            dealt = (rest * (1 + ranks))[: each * ranks]
            optimizer.zero_grad()
            for rank in range(ranks):
                (loss(data[dealt[rank::ranks][batch * 8 :][:8]]) / ranks).backward()
            optimizer.step()
            step, batch = step + 1, batch + 1
            consumed = min(before + min(batch * 8, each) * ranks, 512)
    return loss(data).item()

"""Scripts with DataParallel, in processes of their own."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import mpirun
import pytest

pytestmark = pytest.mark.timeout(200)

SCRIPT = Path(__file__).parents[1] / "scripts" / "data_parallel.py"


def launch(ranks: int, *args: str | Path) -> subprocess.CompletedProcess[str]:
    done = mpirun.run(ranks, args, timeout=90)
    print(done.stdout, done.stderr)
    return done


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"^(?:step|evaluated).* (\S+)$", text, re.M)]


@pytest.mark.thorough
@pytest.mark.essential
@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_script_without_main_guard(ranks: int) -> None:
    alone = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, timeout=90, check=True
    )
    done = launch(ranks, "-m", "mpiddp", "--data-parallel", SCRIPT)
    assert done.returncode == 0
    assert "torch's DataParallel by mpiddp's; only rank 0 runs the script" in done.stderr
    assert len(numbers(done.stdout)) == 5
    assert numbers(done.stdout) == pytest.approx(numbers(alone.stdout), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "error"), [("main", "LookupError: the script"), ("replica", "ValueError on rank 2")]
)
def test_a_script_that_fails(where: str, error: str) -> None:
    done = launch(3, "-m", "mpiddp", "--data-parallel", SCRIPT, "--fail", where)
    assert done.returncode != 0
    assert error in done.stderr
    if where == "replica":
        assert "a replica with few rows" in done.stderr


# How a script ends whose ranks construct the module themselves, and what it must print.
ENDS = {
    "serve": ("model.serve()", "served", 0),
    "without-serve": ("pass", "RuntimeError on rank 1, in forward", 1),
    "rank-0-raises": ("model.serve()\nif rank == 0: raise LookupError('ends')", "ends", 1),
    "rank-0-exits": ("model.serve()\nif rank == 0: sys.exit(0)", "served", 0),
    "rank-1-raises": ("if rank == 1: raise LookupError('ends')\nmodel.serve()", "ends", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_no_end_hangs(how: str, tmp_path: Path) -> None:
    served, expected, status = ENDS[how]
    path = tmp_path / "ends.py"
    path.write_text(
        textwrap.dedent(
            """
            import sys, torch, mpiddp
            from mpi4py import MPI
            rank = MPI.COMM_WORLD.Get_rank()
            model = mpiddp.DataParallel(torch.nn.Linear(300, 300))
            output = None
            if rank == 0 and "raise" not in SERVED:
                output = model(torch.ones(1000, 300)).sum()
                output.backward()
                model(torch.ones(1000, 300)).sum().backward()
            """
        ).replace("SERVED", repr(served))
        + served
        + "\nprint('served' if rank else 'led', flush=True)\n"
    )
    done = launch(3, path)
    assert (done.returncode != 0) == bool(status)
    assert expected in done.stdout + done.stderr


@pytest.mark.slow
def test_a_batch_of_the_size_of_a_model(tmp_path: Path) -> None:
    """Messages that MPI cannot buffer go both ways without waiting for each other."""
    path = tmp_path / "large.py"
    path.write_text(
        textwrap.dedent(
            """
            import torch
            torch.manual_seed(0)
            model = torch.nn.DataParallel(torch.nn.Linear(1024, 1024))
            whole = torch.randn(6000, 1024, requires_grad=True)
            outputs = [model(whole) for _ in range(3)]
            sum(output.square().mean() for output in outputs).backward()
            expected = torch.autograd.grad(3 * model.module(whole).square().mean(), whole)[0]
            torch.testing.assert_close(whole.grad, expected)
            with torch.no_grad():
                model(whole)
            try:
                model(whole)[:, :5].sum().backward(torch.ones(3))
            except RuntimeError:
                print("all well")
            """
        )
    )
    done = launch(3, "-m", "mpiddp", "--data-parallel", path)
    assert (done.returncode, done.stdout) == (0, "all well\n")

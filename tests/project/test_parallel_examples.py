"""The examples that divide a model among the ranks do as with Gloo, and as on one rank."""

import re
from pathlib import Path

import mpirun
import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.once, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"


GLOO = ("--backend", "gloo")


def run(ranks: int, *command: str | Path) -> str:
    """Return what a program prints on MPI."""
    done = mpirun.run(ranks, command, timeout=140, env={"GLOO_SOCKET_IFNAME": "lo"})
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_decoding_is_the_same_on_any_number_of_ranks() -> None:
    """And on Gloo, by torchrun, whose exit status says nothing: start_on_gloo in script_runs.py."""
    program = (EXAMPLES / "tensor_parallel.py", "--layers", "2", "--tokens", "24")
    printed = {n: run(n, *program) for n in (1, 2, 4)}
    for n, text in printed.items():
        assert re.search(rf"(?m)^[\d.]+ tokens a second on {n} ranks$", text)
    on_gloo = mpirun.run_torchrun(2, [*program, *GLOO], 140).stdout
    said = [re.findall("(?m)^tokens: (.*)", text) for text in (*printed.values(), on_gloo)]
    assert said == [said[0]] * 4
    assert len(set(said[0][0].split())) > 12  # not one word again and again


def test_ranks_that_cannot_share_the_heads_are_told() -> None:
    done = mpirun.run(3, [EXAMPLES / "tensor_parallel.py"], timeout=140)
    assert done.returncode != 0
    assert "8 heads cannot be divided among 3 ranks" in done.stderr


def test_fsdp2_learns_as_on_gloo() -> None:
    program = (EXAMPLES / "fsdp2.py", "--steps", "8")
    texts = {n: run(n, *program) for n in (2, 4)}
    for n, text in texts.items():
        held = re.search(rf"rank 0 of {n} has (\d+) of (\d+) parameters", text)
        assert held, text
        assert int(held[1]) * n == pytest.approx(int(held[2]), rel=0.01)
    on_gloo = run(2, "-m", "mpiddp", "--backend", "keep", *program, *GLOO)
    mine, others, torchs = (
        [float(loss) for loss in re.findall(r"(?m)^step \d+: loss ([\d.]+)$", text)]
        for text in (*texts.values(), on_gloo)
    )
    assert len(mine) == 8
    assert mine == pytest.approx(torchs, abs=5e-5)
    assert others == pytest.approx(torchs, abs=5e-5)
    assert mine[-1] < mine[0] - 1

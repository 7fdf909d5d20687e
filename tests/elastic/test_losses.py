"""Ranks are killed while a program trains under mpiddp.elastic."""

import json
import random
import re
import subprocess

import mpirun
import pytest
from script_runs import SCRIPTS

import mpiddp

OPEN_MPI = mpiddp.compiled_against()[0] == "Open MPI"
needs_ulfm = pytest.mark.skipif(not OPEN_MPI, reason="only Open MPI goes on without a rank")

pytestmark = pytest.mark.timeout(150)


def train(
    ranks: int, steps: int, kills: dict[int, float], transport: str = "auto"
) -> "subprocess.CompletedProcess[str]":
    told = [f"{rank}:{seconds:.3f}" for rank, seconds in kills.items()]
    options = ["--with-ft", "ulfm"] if OPEN_MPI else []
    python = [mpirun.sys.executable, str(SCRIPTS / "elastic_training.py"), str(steps), *told]
    command = [mpirun.find(), *options, "-n", str(ranks), *python]
    done = mpirun.run_command(command, timeout=120, env={"MPIDDP_TRANSPORT": transport})
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    return done


def said(done: "subprocess.CompletedProcess[str]") -> "list[dict]":
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@needs_ulfm
@pytest.mark.parametrize(
    "transport",
    [
        "auto",
        pytest.param("exchange", marks=pytest.mark.slow),
        pytest.param("mpi", marks=pytest.mark.thorough),
    ],
)
def test_others_go_on(transport: str) -> None:
    done = train(3, 300, {1: 0.3}, transport)
    assert done.returncode == 0
    ended = said(done)
    assert sorted(each["rank"] for each in ended) == [0, 2]
    assert len({each["bits"] for each in ended}) == 1
    assert len({each["loss"] for each in ended}) == 1
    for each in ended:
        assert each["steps"] == 300
        (first, _), (second, step) = each["worlds"]
        assert (first, second) == (3, 2)
        assert step > 0
    assert ended[0]["worlds"] == ended[1]["worlds"]
    told = re.search(
        r"mpiddp: 1 of 3 ranks was lost; the others go on after (\d+\.\d) s", done.stderr
    )
    assert told
    assert float(told[1]) < 10


@needs_ulfm
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_two_ranks_at_random_moments() -> None:
    draw = random.Random(1)
    for _ in range(50):
        first, second = draw.sample(range(4), 2)
        began = draw.uniform(0, 1.2)
        later = draw.choice([began, began + draw.uniform(0, 1), draw.uniform(0, 1.5)])
        kills = {first: began, second: later}
        transport = draw.choice(["auto", "auto", "mpi", "exchange"])
        ended = said(train(4, 500, kills, transport))
        assert {each["rank"] for each in ended} >= set(range(4)) - {first, second}, kills
        assert len({each["bits"] for each in ended}) == 1
        assert {each["steps"] for each in ended} == {500}


@pytest.mark.skipif(OPEN_MPI, reason="Open MPI goes on")
def test_says_that_a_lost_rank_ends_the_job() -> None:
    done = train(2, 20, {})
    assert done.returncode == 0
    assert (
        done.stderr.count("mpiddp: rank 0: a rank that is lost ends this job, since MPICH ends")
        == 1
    )
    assert len({each["bits"] for each in said(done)}) == 1

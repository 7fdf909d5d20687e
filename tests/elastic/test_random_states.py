"""The random numbers after a loss and after a restart are those of a run that nothing disturbed."""

import json
import random
import subprocess
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from elastic_runs import needs_ulfm, start

pytestmark = pytest.mark.timeout(150)

STEPS = 12


def train(ranks: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return start(ranks, "elastic_random.py", str(STEPS), *arguments)


def ends(done: "subprocess.CompletedProcess[str]") -> "list[dict]":
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    # One that came has the rank that another one had at its start.
    return sorted(said, key=lambda each: (each["rank"], each["worlds"]))


def undisturbed(seed: int) -> "list[list[float]]":
    """Return what elastic_random.py draws on the rank of this seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.nn.Linear(4, 1)
        python, of_numpy = random.Random(seed), np.random.RandomState(seed)
        return [
            [torch.rand(3, 4)[0, 0].item(), python.random(), of_numpy.random_sample()]
            for _ in range(STEPS)
        ]


@pytest.mark.thorough
@needs_ulfm
def test_others_go_on_with_their_streams() -> None:
    ended = ends(train(3, "--kill=1:5"))
    assert [each["worlds"] for each in ended] == [[[3, 0], [2, 5]]] * 2
    assert [each["drawn"] for each in ended] == [undisturbed(0), undisturbed(2)]


@needs_ulfm
@pytest.mark.slow
def test_who_comes_has_a_stream_of_its_own() -> None:
    runs = [ends(train(3, "--kill=1:5", '--options={"replace": true}')) for _ in range(2)]
    assert runs[0] == runs[1]
    by_rank = {tuple(each["drawn"][-1]) for each in runs[0]}
    assert len(by_rank) == 3
    others = [each for each in runs[0] if len(each["worlds"]) == 2]
    assert [each["drawn"] for each in others] == [undisturbed(0), undisturbed(2)]


@needs_ulfm
@pytest.mark.slow
def test_an_exception_that_ends_its_rank_alone() -> None:
    done = train(3, "--fail=1:5", '--options={"exceptions_are_losses": true}')
    assert "ValueError: this rank fails" in done.stderr
    assert [each["drawn"] for each in ends(done)] == [undisturbed(0), undisturbed(2)]


@pytest.mark.slow
@pytest.mark.parametrize("then", [2, 3, 1])
def test_a_job_that_is_started_again(then: int) -> None:
    """It goes on from its snapshot, once; as many ranks have the same streams, others their own."""
    name = f"--name=elastic-test-{uuid.uuid4().hex}"
    assert not ends(train(2, name, "--leave-at=5"))
    again = ends(train(then, name))
    assert len(again) == then
    for each in again:
        ((ranks, step),) = each["worlds"]
        assert ranks == then
        assert 0 < step <= 5
        if each["rank"] < 2:
            assert each["drawn"][step:] == undisturbed(each["rank"])[step:]
    assert len({each["drawn"][-1][0] for each in again}) == then
    assert not list(Path("/dev/shm").glob(f"*{name[7:]}"))
    assert [each["worlds"] for each in ends(train(2, name))] == [[[2, 0]]] * 2

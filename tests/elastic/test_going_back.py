"""A rank is lost between a step and its commit: the others go on from the last commit."""

import importlib.util
import json

import pytest
from elastic_runs import needs_ulfm, start
from script_runs import SCRIPTS

pytestmark = [pytest.mark.timeout(150), needs_ulfm]


def undisturbed() -> "list[float]":
    """Return what elastic_goes_back.py learns in one process."""
    spec = importlib.util.spec_from_file_location("goes_back", SCRIPTS / "elastic_goes_back.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    learned: list[float] = script.alone()
    return learned


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("where", "every", "step"),
    [("log", 1, 4), ("epoch", 1, 6), ("backward", 3, 3), ("start", 1, 0), ("log", 3, 3)],
)
def test_learns_what_nothing_has_disturbed(where: str, every: int, step: int) -> None:
    """Parameters, buffers, momentum and learning rate: no step is lost, and none is taken twice."""
    done = start(3, "elastic_goes_back.py", where, f"--every={every}")
    assert done.returncode == 0
    ended = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(each["rank"] for each in ended) == [0, 1]
    for each in ended:
        assert each["began"] == [[3, 0], [2, step]]
        assert each["learned"] == pytest.approx(undisturbed(), rel=1e-9)

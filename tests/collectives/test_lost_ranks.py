"""A rank is killed in the middle of a collective in memory: the others hear of it at once."""

import itertools
import json
import time
from pathlib import Path

import patience
import pytest
from elastic_runs import OPEN_MPI, needs_ulfm, start

NAMES = (
    "all_reduce", "all_reduce, asynchronous", "largest", "reduce", "broadcast", "all_gather",
    "reduce_scatter", "all_to_all_single", "all_to_all", "gather", "scatter", "small all_reduce",
    "barrier",
)  # fmt: skip
# Seconds from the first call on, so that it is in one round or another.
MOMENTS = (0.1, 0.1007, 0.1013)

pytestmark = [pytest.mark.timeout(100), pytest.mark.thorough(keep=2)]


# Of these the large ones go in lanes between nodes.
IN_LANES = ("all_reduce", "all_reduce, asynchronous", "broadcast", "all_gather", "reduce_scatter")
SUPPORT = Path(__file__).parents[1] / "support"


def run(
    name: str, moment: float, folder: Path, lossy: bool, in_lanes: bool = False
) -> "tuple[int, str, str]":
    arguments = (name, str(moment), str(folder))
    env = {"TWO_TO_A_NODE": "1", "PYTHONPATH": str(SUPPORT)} if in_lanes else {}
    done = start(3 + in_lanes, "kill_in_collective.py", *arguments, lossy=lossy, **env)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("moment", "name"), [*itertools.product(MOMENTS[:1], NAMES)])
def test_the_job_ends(moment: float, name: str, tmp_path: Path) -> None:
    status, _, said = run(name, moment, tmp_path, lossy=False)
    took = time.monotonic() - float((tmp_path / "began").read_text())
    assert status != 0
    assert "rank 1 (process" in said or not OPEN_MPI  # MPICH's launcher says it
    assert took < patience.enough(4)


@needs_ulfm
@pytest.mark.parametrize(("moment", "name"), [*itertools.product(MOMENTS, NAMES)])
def test_the_others_go_on(moment: float, name: str, tmp_path: Path) -> None:
    status, out, _ = run(name, moment, tmp_path, lossy=True)
    assert status == 0
    told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert sorted(each["rank"] for each in told) == [0, 2]
    for each in told:
        assert each["after"] < patience.enough(4)


@pytest.mark.parametrize(("moment", "name"), [*itertools.product(MOMENTS[:1], IN_LANES)])
def test_the_job_ends_between_nodes(moment: float, name: str, tmp_path: Path) -> None:
    """In lanes: some wait for the rank in the node's memory, and others for its messages."""
    status, _, said = run(name, moment, tmp_path, lossy=False, in_lanes=True)
    took = time.monotonic() - float((tmp_path / "began").read_text())
    assert status != 0
    assert "rank 1 (process" in said or not OPEN_MPI  # MPICH's launcher says it
    assert took < patience.enough(4)

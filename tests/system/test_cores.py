"""The cores of a process whose main thread OpenMP ties to one of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpiddp.system import cores

GIVEN = sorted(os.sched_getaffinity(0))

# With the path of cores.py for an argument there is no OpenMP library: mpiddp loads torch's.
PROGRAM = """
import json, os, runpy, sys
if sys.argv[1] == "torch":
    import torch
    found = vars(__import__("mpiddp.system.cores").system.cores)
else:
    found = runpy.run_path(sys.argv[1])
threads = range(1, 4)
print(json.dumps({
    "main": sorted(os.sched_getaffinity(0)),
    "available": sorted(found["available"]()),
    "beside": [sorted(found["beside_openmp"](threads)) for threads in threads],
}))
"""

pytestmark = pytest.mark.once

several_cores = pytest.mark.skipif(len(GIVEN) < 2, reason="needs two cores")


def ask(
    environment: dict[str, str], *, allowed: list[int] = GIVEN, openmp: str = "torch"
) -> dict[str, list[int]]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, openmp],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@several_cores
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "environment",
    [
        {"OMP_PROC_BIND": "true"},
        {"OMP_PROC_BIND": "close", "OMP_PLACES": "threads"},
        {"OMP_PLACES": "threads"},
    ],
    ids=str,
)
def test_all_are_found_though_openmp_took_them(environment: dict[str, str]) -> None:
    found = ask(environment)
    assert found["main"] == GIVEN[:1]
    assert found["available"] == GIVEN
    others = GIVEN[1:]
    assert found["beside"] == [others, GIVEN[2:] or others, GIVEN[3:] or others]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("environment", [{}, {"OMP_PROC_BIND": "false"}], ids=str)
def test_openmp_ties_nothing(environment: dict[str, str]) -> None:
    assert ask(environment) == {"main": GIVEN, "available": GIVEN, "beside": [[], [], []]}


@pytest.mark.essential
@several_cores
def test_what_the_launcher_allows_is_all() -> None:
    """As Open MPI does, which gives each rank one core unless told otherwise."""
    for environment in ({}, {"OMP_PROC_BIND": "true"}):
        last = GIVEN[-1:]
        found = ask(environment, allowed=last)
        assert found == {"main": last, "available": last, "beside": [[], [], []]}


def test_a_place_of_all_cores_is_no_core() -> None:
    found = ask({"OMP_PLACES": "{" + ",".join(map(str, GIVEN)) + "}"})
    assert found["available"] == GIVEN
    if len(GIVEN) > 1:
        assert found == {"main": GIVEN, "available": GIVEN, "beside": [[], [], []]}


def test_without_openmp() -> None:
    file = Path(cores.__file__)
    found = ask({"OMP_PROC_BIND": "true"}, openmp=str(file))
    assert found == {"main": GIVEN, "available": GIVEN, "beside": [[], [], []]}


@pytest.mark.parametrize(
    ("places", "master", "threads", "expected"),
    [
        pytest.param([{0}, {1}, {2}, {3}], {0}, 2, {2, 3}, id="left over"),
        pytest.param([{0}, {1}, {2}, {3}], {3}, 2, {1, 2}, id="team goes round the end"),
        pytest.param([{0}, {1}, {2}], {1}, 3, {0, 2}, id="none left over"),
        pytest.param([{0}, {1}], {1}, 8, {0}, id="more threads than cores"),
        pytest.param([{5}], {5}, 1, set(), id="one core"),
        pytest.param([{0, 4}, {1, 5}], {0, 4}, 1, set(), id="places of two"),
        pytest.param([{0}, {1}], {7}, 1, set(), id="tied elsewhere by the user"),
        pytest.param([], {0}, 1, set(), id="bound by the launcher alone"),
    ],
)
def test_left_over(
    places: list[set[int]], master: set[int], threads: int, expected: set[int]
) -> None:
    assert cores.left_over(places, master, threads) == expected


def test_a_core_is_spare_beside_all_threads_of_all_ranks() -> None:
    assert cores.are_spare(count=4, ranks=2, threads=1)
    assert not cores.are_spare(count=3, ranks=2, threads=1)
    assert not cores.are_spare(count=4, ranks=1, threads=4)

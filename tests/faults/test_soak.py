"""Many steps on random models, with forks and groups that come and go: nothing grows."""

import json

import mpirun
import pytest
from script_runs import SCRIPTS

# Kilobytes by which the memory may differ, besides a fraction of a byte a step: what the allocator
# keeps, and torch's own caches.
_SPREAD = 6_000


@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(2_000, marks=pytest.mark.timeout(100)),
        pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_nothing_grows(steps: int) -> None:
    done = mpirun.run(2, [SCRIPTS / "soak.py", str(steps)], timeout=steps / 60 + 60)
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    assert done.returncode == 0
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["steps"] >= steps
    for early, late in said["ranks"]:
        assert late["descriptors"] <= early["descriptors"]
        assert late["threads"] <= early["threads"]
        assert late["python_threads"] <= early["python_threads"]
        assert late["communicators"] <= early["communicators"]
        assert late["handle"] <= early["handle"]
        assert late["maps"] <= early["maps"] + 20
        assert late["memory"] <= early["memory"] + _SPREAD

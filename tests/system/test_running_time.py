"""The running time: what a process was stopped for counts for no limit, however often it was."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.once

# Who has not looked for some seconds takes them for a stop, as far as no other stop lies in them:
# those in the loop last from the one before until now.
STOPS = """\
import sys, time
from mpiddp.system import running_time

before = time.monotonic() - 20
clock = running_time.Clock()
clock.looked -= 10
clock.now()
time.sleep(0.2)
between = time.monotonic()
ran = running_time.at(between)
time.sleep(0.2)
clock.now()
time.sleep(2.1)
clock.now()
for _ in range(int(sys.argv[1])):
    clock.looked -= 10
    clock.now()
now = time.monotonic()
assert abs(running_time.at(now) - running_time.now()) < 0.01
assert 0.19 < running_time.now() - ran < 1
assert running_time.at(before) == before
later = running_time.at(between) - ran
"""


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("stops", "then"),
    [
        (30, "assert abs(later) < 1e-6"),
        # More than are remembered: a moment between the oldest counts as a later one.
        (5000, "assert 0 <= later < 1"),
    ],
)
def test_moments_before_many_stops(stops: int, then: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPS + then, str(stops)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr

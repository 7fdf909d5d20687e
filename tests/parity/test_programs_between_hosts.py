"""Programs drawn at random, of groups on two hosts: the same bits on all ranks, or all raise.

tests/scripts/programs_on_hosts.py draws them.
"""

import sys
from collections.abc import Iterator

import pytest
from script_runs import SCRIPTS, objects_in
from slurm_lab import Hosts, start_hosts

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the lab is made of Linux namespaces"),
]

# The fuzzer's own seeds begin where those of the tests end.
FIRST = 1000


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with start_hosts(2, slurm=False) as started:
        yield started


def check(hosts: Hosts, first: int, count: int, seconds: float, **env: str) -> None:
    """Run programs on 3 ranks of one host and 1 of the other, placed by turns."""
    arguments = [str(first), str(count), str(seconds)]
    script = str(SCRIPTS / "programs_on_hosts.py")
    done = hosts.mpirun(
        "node1:3,node2:1", script, *arguments, turns=True, timeout=seconds + 150, env=env
    )
    (told,) = objects_in(done.stdout)
    assert not told["failed"]
    assert done.returncode == 0
    assert told["ran"] > 0


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_some_programs(hosts: Hosts) -> None:
    check(hosts, 0, 20, 150)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_ten_minutes(hosts: Hosts) -> None:
    check(hosts, FIRST, 10**6, 600)

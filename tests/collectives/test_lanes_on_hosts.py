"""Large collectives of ranks on several hosts, which are network namespaces, beside Gloo."""

import sys
from collections.abc import Iterator

import pytest
from script_runs import SCRIPTS, objects_in
from slurm_lab import Hosts, start_hosts

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the lab is made of Linux namespaces"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with start_hosts(2, slurm=False) as started:
        yield started


# In turns, two ranks of a host are not neighbours.
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("turns", [False, True])
def test_as_gloo(hosts: Hosts, turns: bool) -> None:
    script = str(SCRIPTS / "lanes_on_hosts.py")
    done = hosts.mpirun("node1:2,node2:2", script, turns=turns, timeout=200)
    assert done.returncode == 0
    told = objects_in(done.stdout)
    assert sorted(each["rank"] for each in told) == [0, 1, 2, 3]
    assert all(each["compared"] == 6 * 7 for each in told)
    if turns and hosts.mpi != "Open MPI":
        return  # MPICH takes each turn for a node of its own, so there are none
    assert all(each["lanes"] for each in told)

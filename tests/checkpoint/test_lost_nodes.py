"""Jobs that lose a node for real, and go on from the snapshot in the memory of the others."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from mpirun import find
from script_runs import SCRIPTS, objects_in
from slurm_lab import Hosts, start_hosts

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the lab is made of Linux namespaces"),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with start_hosts(2) as started:
        yield started


@pytest.fixture(autouse=True)
def _as_before(hosts: Hosts) -> Iterator[None]:
    yield
    hosts.try_cluster("clear")
    hosts.cluster("on", "node2")


def train(hosts: Hosts, nodes: "list[str]", *arguments: str) -> "tuple[int, list[dict[str, Any]]]":
    """Run snapshot_training.py with a rank on each node; return the status and what ranks said."""
    agent = str(hosts.folder / "lab" / "agent")
    if hosts.mpi == "Open MPI":
        where = ",".join(f"{node}:1" for node in nodes)
        options = ["--map-by", "slot", "--host", where, "--prtemca", "plm_ssh_agent", agent]
    else:
        options = ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", ",".join(nodes)]
    words = ["env", "OMP_NUM_THREADS=1", find(), *options, "-n", str(len(nodes))]
    program = [sys.executable, str(SCRIPTS / "snapshot_training.py"), *arguments]
    done = hosts.try_cluster("run", "head", *words, *program, timeout=90)
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    return done.returncode, objects_in(done.stdout)


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_a_node_is_switched_off(hosts: Hosts, kind: str) -> None:
    """On what is left, and on as many nodes as before; with the bits of a job that lost none."""
    both = ["node1", "node2"]
    under_way = hosts.folder / f"{kind} under way"
    under_way.mkdir()
    with ThreadPoolExecutor(1) as thread:
        options = (kind, kind, "1000000", "--under-way", str(under_way))
        job = thread.submit(train, hosts, both, *options)
        while len(list(under_way.iterdir())) < 2:
            assert not job.done()
            time.sleep(0.1)
        hosts.cluster("off", "node2")
        _, said = job.result()  # Open MPI's status may be 0, when a node is lost
    assert said == []

    status, (left,) = train(hosts, ["node1"], kind, kind, "0")
    assert status == 0
    assert left["first"] > 0

    hosts.cluster("on", "node2")  # its memory is empty
    last = left["first"] + 20
    status, resumed = train(hosts, both, kind, kind, str(last))
    assert status == 0
    assert [(each["first"], each["last"]) for each in resumed] == 2 * [(left["first"], last)]
    status, whole = train(hosts, both, kind, f"{kind} again", str(last))
    assert status == 0
    assert {each["first"] for each in whole} == {0}
    assert len({each["bits"] for each in resumed + whole}) == 1

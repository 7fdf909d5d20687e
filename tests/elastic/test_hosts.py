"""Elastic training between hosts: ranks and hosts that are lost, and a job that comes."""

import json
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from elastic_runs import OPEN_MPI, needs_ulfm
from script_runs import SCRIPTS
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


def train(hosts: Hosts, where: str, *arguments: str, **env: str) -> "tuple[int, str]":
    """Run elastic_training.py on hosts, such as "node1:2"; return the status and what it said."""
    options = ["--with-ft", "ulfm"] if OPEN_MPI else []
    script = str(SCRIPTS / "elastic_training.py")
    done = hosts.mpirun(where, script, *arguments, options=options, timeout=150, env=env)
    return done.returncode, done.stdout + done.stderr


def ends(said: str) -> "list[dict]":
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


@needs_ulfm
def test_all_ranks_of_a_host_are_lost(hosts: Hosts) -> None:
    status, said = train(hosts, "node1:2,node2:2", "300", "--kill=2:0.5", "--kill=3:0.5")
    assert status == 0
    ended = ends(said)
    assert sorted(each["rank"] for each in ended) == [0, 1]
    assert len({each["bits"] for each in ended}) == 1
    assert {each["worlds"][-1][0] for each in ended} == {2}
    assert {each["steps"] for each in ended} == {300}


@needs_ulfm
def test_a_host_that_is_switched_off_ends_the_job(hosts: Hosts) -> None:
    """Open MPI's launcher ends it (docs/how-to/elastic.md); the others do not wait for ever."""
    under_way = hosts.folder / "under way"

    def switch_off() -> float:
        while not under_way.exists():
            time.sleep(0.1)
        hosts.cluster("off", "node2")
        return time.monotonic()

    with ThreadPoolExecutor(1) as thread:
        off = thread.submit(switch_off)
        _, said = train(hosts, "node1:2,node2:2", "1000000", "--under-way", str(under_way))
        ended = time.monotonic()
        assert ended - off.result(timeout=10) < 30
    hosts.cluster("on", "node2")
    assert ends(said) == []
    # Its launch agent ends with the host (tests/lab): mpirun says what it has noticed first.
    assert re.search(r"lost communication with a remote daemon|daemon failed to report back", said)


@pytest.mark.skipif(OPEN_MPI, reason="Open MPI connects no jobs of two mpiruns")
def test_a_job_comes_from_another_host(hosts: Hosts) -> None:
    script = [str(SCRIPTS / "elastic_training.py"), "50", "--admit", str(hosts.folder / "meeting")]

    def job(node: str, **env: str) -> "list[dict]":
        options = [
            f"--nodelist={node}",
            f"--export={','.join(['ALL', *map('='.join, env.items())])}",
        ]
        done = hosts.srun(*script, ranks=2, nodes=1, options=options, timeout=100)
        assert done.returncode == 0
        assert "cannot share memory" not in done.stderr  # each knows its node
        return ends(done.stdout)

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(job, "node1")
        come = job("node2", MPIDDP_JOIN=str(hosts.folder / "meeting"))
        ended = first.result(timeout=100) + come
    assert [len(each["worlds"]) for each in ended] == [2, 2, 1, 1]
    assert {each["worlds"][-1][0] for each in ended} == {4}
    assert len({each["bits"] for each in ended}) == 1

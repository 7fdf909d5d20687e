"""Elastic training between hosts: ranks and hosts that are lost, and a job that comes."""

import json
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import patience
import pytest
from elastic_runs import OPEN_MPI, learned, needs_ulfm
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
@pytest.mark.parametrize("lost", [[3], [2, 3], [0], [0, 1]], ids=str)
def test_parameters_that_nodes_share(hosts: Hosts, lost: "list[int]") -> None:
    """Ranks of a node that are left, or those of another node, have the node's commit."""
    kills = [f"--kill={rank}:0.5" for rank in lost]
    status, said = train(hosts, "node1:2,node2:2", "300", *kills, MPIDDP_SHARED_PARAMETERS="1")
    assert status == 0
    ended = ends(said)
    assert sorted(each["rank"] for each in ended) == sorted({0, 1, 2, 3} - {*lost})
    assert len({each["bits"] for each in ended}) == 1
    for each in ended:
        assert each["steps"] == 300
        assert each["worlds"][-1][0] == 4 - len(lost)
        assert each["loss"] == pytest.approx(learned(each["worlds"], 300), rel=1e-6)


@pytest.mark.parametrize("ulfm", [pytest.param(True, marks=needs_ulfm), False])
def test_a_host_that_is_switched_off_ends_the_job(hosts: Hosts, ulfm: bool) -> None:
    """Open MPI's launcher ends it, with 0 (docs/how-to/elastic.md): `mpiddp launch` says so."""
    under_way = hosts.folder / f"under way {ulfm}"

    def switch_off() -> float:
        while not under_way.exists():
            time.sleep(0.1)
        hosts.cluster("off", "node2")
        return time.monotonic()

    with ThreadPoolExecutor(1) as thread:
        off = thread.submit(switch_off)
        done = hosts.mpirun(
            "node1:2,node2:2",
            *(str(SCRIPTS / "elastic_training.py"), "1000000", "--under-way", str(under_way)),
            options=["--with-ft", "ulfm"] if ulfm else [],
            before=[str(Path(sys.executable).parent / "mpiddp"), "launch"],
            timeout=150,
        )
        ended = time.monotonic()
        assert ended - off.result(timeout=10) < 30 * patience.factor()
    hosts.cluster("on", "node2")
    assert ends(done.stdout) == []
    assert done.returncode not in (0, 124)
    if OPEN_MPI:
        # Its launch agent ends with the host (tests/lab): mpirun says what it has noticed first.
        pages = r"lost communication with a remote daemon|daemon failed to report back"
        assert re.search(pages, done.stdout + done.stderr)
        assert "mpiddp: mpirun has lost the host node2" in done.stderr


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

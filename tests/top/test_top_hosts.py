"""A job of SLURM on two nodes: `srun --overlap` shows the ranks of each."""

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import patience
import pytest
from slurm_lab import SRUN, Hosts, start_hosts
from watching import SCRIPT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="the lab is made of Linux namespaces"),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with start_hosts(2) as made:
        yield made


def top(hosts: Hosts, job: str, *arguments: str, options: Sequence[str] = ()) -> str:
    """Return what all nodes of a job print."""
    return hosts.on_head(
        *("srun", "--overlap", f"--jobid={job}", "-N2", "--ntasks-per-node=1", *options),
        *(f"--chdir={hosts.folder}", sys.executable, "-m", "mpiddp.top", *arguments),
    )


def top_as_json(hosts: Hosts, job: str) -> dict[str, Any]:
    """Return what each node says, by its name."""
    top(hosts, job, "--json", options=[f"--output={hosts.folder}/top-%N.json"])
    files = sorted(hosts.folder.glob("top-*.json"))
    told = {path.name[len("top-") : -len(".json")]: json.loads(path.read_text()) for path in files}
    assert all(each["host"] == host for host, each in told.items())
    return told


def test_each_node_prints_its_ranks(hosts: Hosts) -> None:
    plugin, variables = SRUN[hosts.mpi]
    hosts.env |= variables | {"OMP_NUM_THREADS": "1"}
    batch = hosts.folder / "job.sbatch"
    batch.write_text(
        f"#!/bin/bash\nexec srun --overlap --mpi={plugin} -N2 -n3 {sys.executable} {SCRIPT} "
        f"word {hosts.folder} train\n"
    )
    output = hosts.folder / "job.out"
    job = hosts.on_head(
        *("sbatch", "--parsable", "-N2", "-n4", f"--output={output}"),
        *(f"--chdir={hosts.folder}", str(batch)),
    )
    told = wait_for_steps(hosts, job, output)
    assert sorted(told) == ["node1", "node2"]
    ranks = {}
    for host, each in told.items():
        (found,) = each["jobs"]
        assert found["size"] == 3
        assert f"slurm-{job}-" in found["job"]
        for row in found["ranks"]:
            ranks[row["rank"]] = host
            assert row["slowest_rank"] == 2
            assert row["slowest_in_steps"] > 12
            assert row["waiting_for_last_share"] > 0.3 or row["rank"] == 2
    assert sorted(ranks) == [0, 1, 2]
    assert set(ranks.values()) == {"node1", "node2"}

    lines = top(hosts, job).splitlines()
    heads = sorted(line for line in lines if "; step " in line)
    assert [line.split(":")[0] for line in heads] == ["node1", "node2"]
    assert all(" of 3; step " in line for line in heads)
    assert all("rank 2 was the last in " in line for line in heads)
    rows = [line.split()[:2] for line in lines if re.match(r"node\d: +\d+ +\d", line)]
    assert sorted(rows) == sorted([f"{host}:", str(rank)] for rank, host in ranks.items())
    (hosts.folder / "stop").touch()


def wait_for_steps(hosts: Hosts, job: str, output: Path) -> dict[str, Any]:
    """Return what each host says, by its name, when all ranks have made 60 steps."""
    end = time.monotonic() + patience.enough(90)
    while time.monotonic() < end:
        state = hosts.on_head("squeue", "--noheader", f"--jobs={job}", "--format=%T")
        if state == "RUNNING":
            told = top_as_json(hosts, job)
            rows = [
                row for each in told.values() for found in each["jobs"] for row in found["ranks"]
            ]
            if len(rows) == 3 and all((row["steps"] or 0) >= 60 for row in rows):
                return told
        time.sleep(0.5)
    raise TimeoutError(output.read_text() if output.exists() else state)

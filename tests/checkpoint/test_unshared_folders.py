"""Checkpoints on the disk of one host: refused, or found again, never passed over in silence."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from script_runs import SCRIPTS, objects_in
from slurm_lab import Hosts, start_hosts

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the lab is made of Linux namespaces"),
]

# Each host of the lab has a /var/tmp of its own.
OWN_DISK = "/var/tmp/checkpoints"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with start_hosts(2, slurm=False) as started:
        yield started


def run(hosts: Hosts, nodes: "list[str]", folder: str, *do: str) -> "list[list[dict[str, Any]]]":
    """Run host_checkpoint.py with a rank on each node; return what ranks said, by what they did."""
    script = str(SCRIPTS / "host_checkpoint.py")
    where = ",".join(f"{node}:1" for node in nodes)
    done = hosts.mpirun(where, script, folder, *do, timeout=120)
    assert done.returncode == 0
    told = objects_in(done.stdout)
    by_rank = [[each for each in told if each["rank"] == rank] for rank in range(len(nodes))]
    return [list(each) for each in zip(*by_rank, strict=True)]


def test_shards_are_refused(hosts: Hosts) -> None:
    """On all ranks, with the host that does not see them; and nothing is left there."""
    (told,) = run(hosts, ["node1", "node2"], OWN_DISK, "shards:1")
    for each in told:
        assert each["error"].startswith(f"RuntimeError: rank {each['rank']} cannot save")
        assert "rank 0 on node1 writes there is not seen by rank 1 on node2" in each["error"]
        assert not each["files"]


def test_a_shared_folder(hosts: Hosts) -> None:
    shared = str(hosts.folder / "checkpoints")
    told = run(hosts, ["node1", "node2"], shared, "shards:1", "save:2", "load", "shards:3", "load")
    assert [[each["result"] for each in of_one] for of_one in (told[2], told[4])] == [
        [2, 2],
        [3, 3],
    ]
    assert not any(each["warned"] for of_one in told for each in of_one)
    names = ["000001-step-1", "000002-step-2", "000003-step-3"]
    assert all(each["files"] == names for each in told[-1])


def test_the_first_rank_comes_to_another_host(hosts: Hosts) -> None:
    """What another host has is found, the newest of all is taken, and numbers go on."""
    one, two = run(hosts, ["node1", "node2"], OWN_DISK, "save:1", "save:2")
    assert [each["files"] for each in two] == [["000001-step-1", "000002-step-2"], None]
    assert "is not seen by rank 1 on node2" in one[0]["warned"][0]
    assert [one[1]["warned"], two[0]["warned"]] == [[], []]
    loaded, saved = run(hosts, ["node2", "node1"], OWN_DISK, "load", "save:3")
    assert [each["result"] for each in loaded] == [2, 2]
    assert "is read by rank 1 on node1, and not seen on node2" in loaded[0]["warned"][0]
    assert saved[0]["files"] == ["000003-step-3"]
    (loaded,) = run(hosts, ["node1", "node2"], OWN_DISK, "load")
    assert [each["result"] for each in loaded] == [3, 3]


def test_two_trainings_on_two_hosts(hosts: Hosts) -> None:
    """Nobody can tell which of them is meant."""
    run(hosts, ["node1", "node2"], OWN_DISK, "save:1")
    _, (_, other) = run(hosts, ["node2", "node1"], OWN_DISK, "save:7", "load")
    assert "two checkpoints of the same number" in other["error"]
    assert "000001-step-1 on node1" in other["error"]
    assert "000001-step-7 on node2" in other["error"]

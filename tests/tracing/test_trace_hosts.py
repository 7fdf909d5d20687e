"""Clocks of several hosts: each has one that is seconds apart from the others'."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from slurm_lab import Hosts, start_hosts

from mpiddp.tracing import merging

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]  # three hosts

# What each host adds to the clock of this machine, in seconds.
APART = {"node1": 40, "node2": 5000, "node3": 7}
# unshare(1) gives the process that it starts a clock of its own.
TRAIN = f"""
import os, socket, sys

if "APART" not in os.environ:
    os.environ["APART"] = str({APART}[socket.gethostname()])
    clock = ["--time", "--monotonic", os.environ["APART"], "--fork"]
    os.execvp("unshare", ["unshare", *clock, sys.executable, *sys.argv])

import torch
import torch.distributed as dist

import mpiddp

mpiddp.init_process_group()
model = mpiddp.DistributedDataParallel(torch.nn.Linear(1000, 1000))
with mpiddp.trace(sys.argv[1]):
    for step in range(20):
        model(torch.ones(4, 1000)).sum().backward()
        dist.all_reduce(torch.ones(3))
mpiddp.destroy_process_group()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with start_hosts(3, slurm=False) as made:
        yield made


def test_hosts_whose_clocks_are_apart(hosts: Hosts) -> None:
    script, place = hosts.folder / "train.py", hosts.folder / "trace"
    script.write_text(TRAIN)
    done = hosts.mpirun("node1:2,node2:1,node3:1", str(script), str(place), timeout=90)
    assert done.returncode == 0, done.stderr
    with gzip.open(place / merging.MERGED, "rt") as file:
        merged = json.load(file)
    facts = merged["mpiddp"]["ranks"]
    assert [each["host"] for each in facts] == ["node1", "node1", "node2", "node3"]
    for each in facts:
        clock = each["clock"]
        apart = APART["node1"] - APART[each["host"]]
        for end in (clock["began"], clock["ended"]):
            assert abs(end["seconds"] - apart) <= end["error"] + 1e-9
        assert abs(clock["drift"]) < 1e-3
    errors = [each["clock"]["error_us"] for each in facts]
    # What is said holds always; that it is small, where the ranks get a core each.
    assert min(errors[1:]) < 200
    sums: dict[int, list[tuple[float, float]]] = {}
    event: dict[str, Any]
    for event in merged["traceEvents"]:
        if event.get("cat") == "collective" and event["name"].startswith("all_reduce"):
            times = (event["ts"], event["ts"] + event["dur"])
            sums.setdefault(event["args"]["number"], []).append(times)
    assert len(sums) == 20
    for times in sums.values():
        assert len(times) == 4
        # None has ended before all have begun.
        assert max(began for began, _ in times) <= min(end for _, end in times) + 2 * max(errors)

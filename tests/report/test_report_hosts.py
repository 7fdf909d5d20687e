"""A fault that is planted in a training on several hosts is what the report names first."""

from collections.abc import Iterator

import pytest
from slurm_lab import ROOT, Hosts, start_hosts

from mpiddp.report import advice, summary, trace_files

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]  # four hosts

PROGRAM = ROOT / "benchmarks" / "slow_steps.py"
EACH = "node1:1,node2:1,node3:1,node4:1"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with start_hosts(4, slurm=False) as made:
        yield made


@pytest.mark.parametrize(
    ("fault", "text", "remedy"),
    [
        ("slow-host", "all wait for rank 2 on node3 since step 11: ", "doctor"),
        ("slow-rank", "all wait for rank 0 on node1 since step 11: ", "between its forward and"),
        ("slow-link", " since buckets queue: ", "mpiddp.compression.bf16"),
        ("slow-link-16-bits", " since buckets queue: 4.0 MiB take ", "sent as bfloat16 already"),
        ("one-bucket", " since all gradients are in one bucket ", "leave bucket_cap_mb unset"),
    ],
)
def test_fault_is_named_first(hosts: Hosts, fault: str, text: str, remedy: str) -> None:
    place = hosts.folder / fault
    hosts.cluster("rate", "2gbit")
    if fault.startswith("slow-link"):
        hosts.cluster("rate", "200mbit", "node2")
    done = hosts.mpirun(EACH, str(PROGRAM), "--train", fault, str(place), timeout=100)
    assert done.returncode == 0, done.stderr
    found = advice.findings(summary.summarize(trace_files.read(place)))
    assert text in found[0].text
    assert remedy in found[0].remedy

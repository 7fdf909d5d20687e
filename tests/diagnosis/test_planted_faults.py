"""The doctor finds faults that are planted in a cluster of real hosts (tests/lab/README.md).

Rates are far apart, since all hosts share the cores of this machine: what must be found is ten
times slower than the rest.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import other_mpi
import pytest
from script_runs import SCRIPTS
from slurm_lab import Hosts, start_hosts

from mpiddp import findings

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the lab is made of Linux namespaces"),
]

Finding = dict[str, str]
DOCTOR = ("-m", "mpiddp.doctor", "--json")
WITH_FAULT = str(SCRIPTS / "doctor_with_fault.py")
# One second less for each run.
QUICK_START = {"OMPI_MCA_btl": "^ofi"}
THREE = "node1:1,node2:1,node3:1"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with start_hosts(3) as started:
        yield started


@pytest.fixture(autouse=True)
def _healthy(hosts: Hosts) -> Iterator[None]:
    yield
    hosts.cluster("clear")
    hosts.cluster("rate", "none")
    for node in ("node1", "node2", "node3"):
        hosts.cluster("run", node, "mount", "-o", "remount,size=50%", "/dev/shm")


def told(done: "subprocess.CompletedProcess[str]", status: int = 0) -> list[Finding]:
    """Return the findings, which lie between what the launcher may have said."""
    assert done.returncode == status
    found = json.loads(re.search(r"^\{\n.*?^\}$", done.stdout, re.MULTILINE | re.DOTALL)[0])
    return found["findings"]


def ask(hosts: Hosts, where: str, *command: str, **env: str) -> list[Finding]:
    """Return what the doctor finds on hosts, such as "node1:2,node2:1"."""
    return told(hosts.mpirun(where, *command, timeout=100, env={**QUICK_START, **env}))


def starting(found: list[Finding], text: str, grade: str = "warning") -> list[Finding]:
    return [each for each in found if each["grade"] == grade and each["text"].startswith(text)]


def only(found: list[Finding], text: str, grade: str = "warning") -> Finding:
    (one,) = starting(found, text, grade)
    return one


def bits(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"(\d[\d.e-]*) Gbit/s", text)]


def test_slow_link_of_a_host(hosts: Hosts) -> None:
    hosts.cluster("rate", "400mbit")
    hosts.cluster("rate", "40mbit", "node2")
    found = ask(hosts, THREE, *DOCTOR)
    slow = only(found, "slow link of host ")
    assert "host node2: " in slow["text"]
    own, others = bits(slow["text"])
    assert 0.01 < own < 0.06 < others < 0.5
    assert not starting(found, "slow link between")
    said = only(found, "wire: eth0 of ")["text"]
    assert " says 10 Gbit/s, " in said  # as a veth does
    assert "node2" in said
    usual = only(found, "messages between nodes: ", "ok")["text"]
    assert usual.endswith(" each way (median of 3 pairs of neighbours), by eth0")


def test_slow_link_between_two_hosts(hosts: Hosts) -> None:
    """What node1 sends to node2 is slow, and what either has with node3 is not."""
    hosts.cluster("rate", "400mbit")
    tc = ("run", "head", "tc")
    try:
        on = ("dev", "to-node2")
        hosts.cluster(*tc, "qdisc", "replace", *on, "root", "handle", "1:", "htb", "default", "10")
        for number, rate in (("1:10", "400mbit"), ("1:20", "40mbit")):
            where = (*on, "parent", "1:", "classid", number)
            hosts.cluster(*tc, "class", "add", *where, "htb", "rate", rate)
    except AssertionError as error:
        pytest.skip(f"this kernel has no qdisc htb: {error}")
    match = ("protocol", "ip", "u32", "match", "ip", "src", "10.77.0.1", "flowid", "1:20")
    hosts.cluster(*tc, "filter", "add", "dev", "to-node2", "parent", "1:", *match)
    found = ask(hosts, THREE, *DOCTOR)
    slow = only(found, "slow link between ")
    assert "between node1 and node2: " in slow["text"]
    assert not starting(found, "slow link of host")


@contextlib.contextmanager
def slow_group(hosts: Hosts, node: str) -> Iterator[str]:
    """Make a control group whose processes get a tenth of a core; return its folder on the node."""
    name, root = f"mpiddp-slow-{os.getpid()}", Path("/sys/fs/cgroup")
    first, kind = root / "cpu" / name, ("-t", "cgroup", "-o", "cpu")
    values = {"cpu.cfs_period_us": "20000", "cpu.cfs_quota_us": "2000"}
    if not (root / "cpu").exists():
        first, kind, values = root / name, ("-t", "cgroup2"), {"cpu.max": "2000 20000"}
    try:
        first.mkdir()
        for file, value in values.items():
            (first / file).write_text(value)
    except OSError as error:
        pytest.skip(f"a control group cannot be made here: {error}")
    try:
        hosts.cluster("run", node, "mount", *kind, "none", "/mnt")
        yield f"/mnt/{name}"
    finally:
        hosts.cluster("clear")
        hosts.cluster("run", node, "umount", "/mnt")
        first.rmdir()


def test_slow_host(hosts: Hosts) -> None:
    with slow_group(hosts, "node2") as group:
        arguments = (WITH_FAULT, "slow_processor", "node2", "--json")
        found = ask(hosts, "node1:1,node2:1", *arguments, SLOW_GROUP=group)
    for what in ("copy memory at", "compute at"):
        slow = only(found, f"slow host node2: its ranks {what} ")
        assert "look for other programs" in slow["remedy"]
    assert not starting(found, "slow host node1")
    assert not starting(found, "slow rank")


def test_wrong_interface(hosts: Hosts) -> None:
    """MPI was told to take a slow network, and each host has another one."""
    ends = {"node1": "10.78.0.1/24", "node2": "10.78.0.2/24"}
    ip = ("run", "node1", "ip")
    pid = Path(hosts.env["LAB_DIR"], "pids.head", "node2").read_text().strip()
    # Only the head knows the nodes' pids.
    link = ("ip", "link", "add", "two", "type", "veth", "peer", "name", "eth1", "netns", pid)
    hosts.on_head(*link)
    first = Path(hosts.env["LAB_DIR"], "pids.head", "node1").read_text().strip()
    hosts.on_head("ip", "link", "set", "two", "netns", first)
    hosts.cluster(*ip, "link", "set", "two", "name", "eth1")
    try:
        for node, address in ends.items():
            on = ("dev", "eth1")
            hosts.cluster("run", node, "ip", "address", "add", address, *on)
            hosts.cluster("run", node, "ip", "link", "set", "eth1", "up")
            limit = ("tbf", "rate", "40mbit", "burst", "100kb", "latency", "50ms")
            hosts.cluster("run", node, "tc", "qdisc", "add", *on, "root", *limit)
        told_to = {"OMPI_MCA_btl_tcp_if_include": "eth1", "UCX_NET_DEVICES": "eth1"}
        found = ask(hosts, "node1:1,node2:1", *DOCTOR, **told_to, FI_TCP_IFACE="eth1")
    finally:
        hosts.cluster(*ip, "link", "delete", "eth1")
    assert only(found, "messages between nodes: ", "ok")["text"].endswith(", by eth1")
    wire = only(found, "wire: eth1 of node")
    assert bits(wire["text"])[1] < 0.1
    assert "or take eth0: Open MPI: OMPI_MCA_btl_tcp_if_include=eth0" in wire["remedy"]


def test_little_shared_memory(hosts: Hosts) -> None:
    """Found before MPI starts, which MPICH does not survive."""
    hosts.cluster("run", "node2", "mount", "-o", "remount,size=1m", "/dev/shm")
    done = hosts.mpirun(
        "node1:2,node2:2",
        *DOCTOR,
        "--quick",
        timeout=100,
        env={**QUICK_START, "PMIX_MCA_gds": "hash"},
    )
    text = r"/dev/shm: \d[\d.]* MiB of 1 MiB free for 2 ranks on node2"
    assert re.search(rf"^mpiddp doctor: {text}\n-> make it larger", done.stderr, re.MULTILINE)
    if done.returncode == 0:
        assert re.fullmatch(text, only(told(done), "/dev/shm: ")["text"])
    assert "node1" not in re.findall("^mpiddp doctor: .*", done.stderr, re.MULTILINE)[0]


def test_few_addresses(hosts: Hosts) -> None:
    arguments = (WITH_FAULT, "few_addresses", "node2", "--json", "--quick")
    found = ask(hosts, "node1:1,node2:1", *arguments)
    limit = only(found, "limit: ulimit -v of a rank on node2 allows addresses of ")
    assert limit["remedy"].startswith("ulimit -v unlimited before the job starts")


def test_all_ranks_on_one_core(hosts: Hosts) -> None:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("there is only one core")
    arguments = (WITH_FAULT, "one_core", "node1,node2", "--json", "--quick")
    found = ask(hosts, "node1:2,node2:2", *arguments)
    threads = only(found, "threads: 1 a rank (OMP_NUM_THREADS=1): 2 ranks x 1 thread on 1 core of ")
    assert threads["remedy"].startswith(f"bind the ranks to other cores: the host has {cores} (")


def test_more_threads_than_cores_and_a_setting_that_hurts(hosts: Hosts) -> None:
    harm = {"OMP_NUM_THREADS": "64", "FI_LOG_LEVEL": "info"}
    found = ask(hosts, "node1:2,node2:2", *DOCTOR, "--quick", **harm)
    text = only(found, "threads: ")["text"]
    assert re.search(r": 2 ranks x \d+ threads on \d+ cores? of node\d take turns", text)
    assert only(found, "setting: FI_LOG_LEVEL=info: ")["remedy"] == "unset FI_LOG_LEVEL"


def test_an_older_version_on_one_host(hosts: Hosts) -> None:
    installed = Path(findings.__file__).with_name("version.py")
    older = hosts.folder / "version.py"
    older.write_text('"""An older one."""\n\n__version__ = "0.0.9"\n')
    mount = ("run", "node2", "mount", "--bind", str(older), str(installed))
    hosts.cluster(*mount)
    try:
        # All hosts have one folder of compiled modules.
        env = {**QUICK_START, "PYTHONDONTWRITEBYTECODE": "1"}
        done = hosts.mpirun("node1:1,node2:1", *DOCTOR, "--quick", timeout=60, env=env)
    finally:
        hosts.cluster("run", "node2", "umount", str(installed))
    (error,) = (each for each in told(done, 1) if each["grade"] == "error")
    assert "version 0.0.9" in error["text"]
    assert "rank 1" in error["text"]


def test_srun_without_mpi(hosts: Hosts) -> None:
    """It knows no MPI, and starts N worlds of one."""
    done = hosts.srun(*DOCTOR, "--quick", ranks=2, options=["--mpi=none"])
    assert done.returncode != 0
    (error,) = (each for each in told(done, done.returncode) if each["grade"] == "error")
    assert re.match("this process is (a world of one|rank 0 of 1)", error["text"])
    assert "--mpi=" in error["remedy"]


@pytest.fixture(scope="module")
def other(hosts: Hosts) -> Path:
    """Return the prefix of the other MPI, which all hosts see."""
    return other_mpi.unpack(hosts.folder)


def test_wrong_mpirun(hosts: Hosts, other: Path) -> None:
    """That of another MPI starts N worlds of one, too."""
    agent = hosts.env["LAB_DIR"] + "/agent"
    words = ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", "node1:1,node2:1"]
    if other_mpi.VENDOR == "Open MPI":
        words = ["--prtemca", "plm_ssh_agent", agent, "--host", "node1:1,node2:1"]
    command = (str(other / "bin" / "mpirun"), *words, "-n", "2", sys.executable, *DOCTOR, "--quick")
    done = hosts.try_cluster("run", "head", "env", "OMP_NUM_THREADS=1", *command, timeout=60)
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    assert done.returncode != 0
    (error,) = (each for each in told(done, done.returncode) if each["grade"] == "error")
    assert re.match(r"this process (is rank 0 of 1, although|was started by the)", error["text"])
    assert f"the one beside {sys.executable}" in error["remedy"]


def test_compiled_for_another_mpi(hosts: Hosts, other: Path) -> None:
    """Said by one rank, before anything starts."""
    interfaces = [*Path(findings.__file__).parent.glob("mpi/calls-*.so")]
    if len(interfaces) > 1:
        pytest.skip("mpiddp was compiled for this MPI and the other one")
    library = sorted(other.glob("lib/libmpi.so.*"))[0]
    env = {"MPI4PY_LIBMPI": str(library)}
    done = hosts.mpirun("node1:1,node2:1", *DOCTOR, "--quick", timeout=60, env=env)
    (error,) = told(done, done.returncode)
    assert done.returncode != 0
    assert error["grade"] == "error"
    assert re.match(
        f"mpiddp was compiled for MPIs with the interface of \\w+, but mpi4py runs on "
        f"{other_mpi.VENDOR} ",
        error["text"],
    )
    assert "Compile it for that MPI: " in error["text"] + error["remedy"]

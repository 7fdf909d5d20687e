"""The batch scripts in slurm/, submitted to a real SLURM on two hosts (lab/README.md)."""

import re
import shutil
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_lab import ROOT, SRUN, Hosts, start_hosts

from mpiddp import checkpoint

SCRIPTS = {
    "Open MPI": "train_openmpi.sbatch",
    "MPICH": "train_mpich.sbatch",
    "Intel MPI": "train_intel.sbatch",
}

DIGEST = re.compile(r"^all 4 replicas hold the same bits: sha256 \w{64}$", re.M)

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="the lab is made of Linux namespaces"),
]


class Slurm:
    """The batch script of the running MPI, and the files of its jobs."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.folder, self.mpi = hosts.folder, hosts.mpi
        self.script = ROOT / "slurm" / SCRIPTS[hosts.mpi]
        self.on_head, self.srun = hosts.on_head, hosts.srun
        hosts.env["VENV"] = sys.prefix
        self.begin_anew("train")

    def submit(self, *arguments: str) -> str:
        """Submit the script as a user would; return the job's number."""
        options = ("--parsable", f"--output={self.log}")
        return self.on_head("sbatch", *options, str(self.script), *arguments)

    def begin_anew(self, name: str) -> None:
        """From now on jobs have a log and a folder of checkpoints of their own."""
        self.log = self.folder / f"{name}.out"
        self.checkpoint = self.folder / name
        self.hosts.env["CHECKPOINT"] = str(self.checkpoint)

    def output(self) -> str:
        """Return what all jobs have printed."""
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    def state(self, job: str) -> str:
        return self.on_head("squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job)

    def wait_for_end(self, job: str, seconds: float = 100) -> None:
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}:
            assert time.monotonic() < deadline, f"job {job} is {state}\n{self.output()}"
            time.sleep(0.5)
        assert state == "COMPLETED", self.output()

    def wait_for_line(self, start: str, job: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while f"\n{start}" not in self.output():
            state = self.state(job)
            assert state in {"PENDING", "CONFIGURING", "RUNNING"}, self.output()
            assert time.monotonic() < deadline, f"job {job} is {state}\n{self.output()}"
            time.sleep(0.5)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if not (Path(sys.prefix) / "bin" / "activate").exists():
        pytest.skip(f"the batch scripts activate a virtual environment, {sys.prefix} is none")
    with start_hosts(2) as hosts:
        yield Slurm(hosts)


@pytest.mark.slow  # a minute, most of it SLURM's own waiting
@pytest.mark.once
def test_a_job_is_requeued_and_a_second_one_resumes(slurm: Slurm) -> None:
    first = slurm.submit()
    slurm.wait_for_line("epoch 2:", first)
    slurm.on_head("scontrol", "requeue", first)
    slurm.wait_for_end(first)
    before, _, after = slurm.output().partition(f"job {first}, start 1: 4 ranks on node[1-2]")
    assert f"job {first}, start 0: 4 ranks on node[1-2]" in before
    assert "not there, starting anew" in before
    assert "world: 4 ranks on 2 nodes" in after
    resumed = re.search(r"(\d+) epochs and \d+ batches are done", after)
    assert resumed, slurm.output()
    assert int(resumed[1]) >= 2
    assert f"epoch {resumed[1]}:" not in after
    assert f"epoch {int(resumed[1]) + 1}:" in after
    accuracy = re.search(r"^test accuracy (\d+\.\d+)% after 15 epochs", after, re.M)
    assert accuracy, after
    assert float(accuracy[1]) >= 97
    digest = DIGEST.search(after)
    assert digest, after
    found = checkpoint.load(slurm.checkpoint)
    assert found is not None
    assert found.step % 15 == 0

    second = slurm.submit()
    slurm.wait_for_end(second)
    after = slurm.output().partition(f"job {second}, start 0: 4 ranks on node[1-2]")[2]
    assert "world: 4 ranks on 2 nodes" in after
    assert "15 epochs and 0 batches are done" in after
    assert accuracy[0] in after
    assert digest[0] in after


@pytest.mark.slow  # two minutes, most of it SLURM's own waiting
@pytest.mark.once
def test_a_job_that_is_asked_to_end_requeues_itself(slurm: Slurm) -> None:
    """And ends with the bits of one that is left alone."""
    slurm.begin_anew("alone")
    alone = slurm.submit("--epochs", "8")
    slurm.wait_for_end(alone)
    expected = DIGEST.search(slurm.output())
    assert expected, slurm.output()

    slurm.begin_anew("asked")
    job = slurm.submit("--epochs", "8")
    slurm.wait_for_line("epoch 2:", job)
    # As --signal in the script does before the time limit.
    whom = ["--batch"] if "--signal=B:USR1@90" in slurm.script.read_text() else []
    slurm.on_head("scancel", "--signal=USR1", *whom, job)
    slurm.wait_for_line("asked to end: saved after step", job)
    slurm.wait_for_end(job, seconds=200)
    _, began_again, after = slurm.output().partition(f"job {job}, start 1: 4 ranks on node[1-2]")
    assert began_again
    saved = re.search(r"asked to end: saved after step (\d+)", slurm.output())
    resumed = re.search(r"(\d+) epochs and (\d+) batches are done", after)
    assert saved
    assert resumed, slurm.output()
    batches = 1437 // 4 // 16
    assert int(resumed[1]) * batches + int(resumed[2]) == int(saved[1])
    digest = DIGEST.search(after)
    assert digest, slurm.output()
    assert digest[0] == expected[0]


@pytest.mark.slow  # most of it SLURM's own waiting
@pytest.mark.once
@pytest.mark.parametrize("lost", ["node2", "node1"])
def test_a_job_that_loses_a_node_is_started_again(slurm: Slurm, lost: str) -> None:
    """The batch script is on node1: where that one is lost, SLURM starts the job again itself."""
    slurm.begin_anew(f"loses-{lost}")
    job = slurm.submit("--epochs", "8")
    slurm.wait_for_line("epoch 3:", job)  # so that the second one is saved
    slurm.hosts.cluster("off", lost)
    time.sleep(25)  # SLURM's own time to notice, and more
    slurm.hosts.cluster("on", lost)
    slurm.wait_for_end(job, seconds=200)
    before, began_again, after = slurm.output().partition(f"job {job}, start 1: 4 ranks on")
    assert began_again, before
    assert ("a node is lost, back into the queue" in before) == (lost == "node2")
    resumed = re.search(r"(\d+) epochs and \d+ batches are done", after)
    assert resumed, after
    assert int(resumed[1]) >= 2
    assert DIGEST.search(after), after


@pytest.mark.slow
@pytest.mark.once
def test_a_program_that_fails_is_not_started_again(slurm: Slurm) -> None:
    """Also where the job has few of the user's variables."""
    slurm.begin_anew("fails")
    few = "--export=VENV,CHECKPOINT"
    for arguments, state in ((["--epochs", "1"], "COMPLETED"), (["--nonsense"], "FAILED")):
        options = ("--parsable", few, f"--output={slurm.log}", "--open-mode=append")
        job = slurm.on_head("sbatch", *options, str(slurm.script), *arguments)
        deadline = time.monotonic() + 100
        while slurm.state(job) in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}:
            assert time.monotonic() < deadline, slurm.output()
            time.sleep(0.5)
        assert slurm.state(job) == state, slurm.output()
    assert "a node is lost" not in slurm.output()
    assert "start 1" not in slurm.output()
    assert DIGEST.search(slurm.output())


@pytest.mark.slow
@pytest.mark.once
def test_a_cancelled_job_stays_so(slurm: Slurm) -> None:
    """It saves, and neither the program nor the batch script puts it back into the queue."""
    slurm.begin_anew("cancelled")
    job = slurm.submit("--epochs", "200")
    slurm.wait_for_line("epoch 2:", job)
    slurm.on_head("scancel", job)
    deadline = time.monotonic() + 60
    while (state := slurm.state(job)) != "CANCELLED":
        assert time.monotonic() < deadline, state
        time.sleep(0.5)
    time.sleep(8)
    assert slurm.state(job) == "CANCELLED"
    assert "asked to end: saved after step" in slurm.output()
    assert "start 1" not in slurm.output()


@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.parametrize("how", [pytest.param("number", marks=pytest.mark.slow), "raise"])
def test_runner_on_two_nodes(slurm: Slurm, how: str) -> None:
    """An unmodified script, whose last rank, on the second node, ends the step."""
    logs = slurm.folder / f"logs-{how}"
    place = str(ROOT / "tests" / "support" / "scripts" / "place.py")
    done = slurm.srun("-m", "mpiddp", "--log-dir", str(logs), "--tag-output", place, how)
    for rank, where in enumerate(["node1: 0 2 0", "node1: 1 2 0", "node2: 0 2 1", "node2: 1 2 1"]):
        written = (logs / f"rank-{rank}.out").read_text()
        assert written == f"rank {rank} on {where} 4, sum 4\n"
    assert done.stdout == "[0] rank 0 on node1: 0 2 0 4, sum 4\n"
    said = "[rank3]: ValueError: broken on purpose\n"
    assert done.stderr.count(said) == (logs / "rank-3.err").read_text().count(said)
    assert done.stderr.count(said) == done.stderr.count("Traceback") == (how == "raise")
    # MPICH and Intel MPI let SLURM kill all of the step, and the status is that.
    assert done.returncode == ({"raise": 1, "number": 3}[how] if slurm.mpi == "Open MPI" else 137)


@pytest.mark.slow
@pytest.mark.once
def test_a_rank_that_dies_is_noticed_by_its_node(slurm: Slurm) -> None:
    """Where srun is told to leave the others alone, they would wait for the timeout.

    With Open MPI they are not: SLURM's plugin for PMIx ends the step by itself.
    """
    script = ROOT / "tests" / "scripts" / "die_while_others_wait.py"
    began = time.monotonic()
    done = slurm.srun(str(script), options=["--kill-on-bad-exit=0"])
    assert time.monotonic() - began < 45
    assert done.returncode != 0
    who = r"mpiddp: rank 2: rank 3 \(process \d+ on node2\) (was ended by SIGKILL|has ended)"
    what = r"all_reduce\(SUM\) of float32 \(10,\) of group '0'"
    said = rf"{who}, and this rank waits for its part of {what}. The job ends"
    assert slurm.mpi == "Open MPI" or re.search(said, done.stderr)


@pytest.mark.slow
@pytest.mark.once
def test_from_a_copy_of_the_environment_on_each_node(slurm: Slurm) -> None:
    """Of a small one that has mpiddp, and finds the rest in the environment of the tests."""
    slurm.begin_anew("packed")
    environment = slurm.folder / "environment"
    venv.create(environment, symlinks=True, with_pip=False)
    packages = Path(sysconfig.get_path("purelib"))
    own = environment / packages.relative_to(sys.prefix)
    shutil.copytree(packages / "mpiddp", own / "mpiddp")
    (own / "others.pth").write_text(f"{packages}\n")
    (own / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'SLURM_PROCID' in os.environ and 'SLURMD_NODENAME' in os.environ:\n"
        "    print('from', sys.prefix, 'on', os.environ['SLURMD_NODENAME'], flush=True)\n"
    )
    slurm.script = ROOT / "slurm" / "train_packed.sbatch"
    plugin, settings = SRUN[slurm.mpi]
    slurm.hosts.env |= settings | {"VENV": str(environment), "SLURM_MPI_TYPE": plugin}
    slurm.hosts.env["LOCAL"] = "/var/tmp"  # which each host has for itself
    # With a whole environment mpi4py finds the MPI that lies in it.
    for library in (Path(sys.prefix) / "lib").glob("libmpi.so.??"):
        slurm.hosts.env["MPI4PY_LIBMPI"] = str(library)

    def train() -> str:
        job = slurm.submit("--epochs", "1")
        slurm.wait_for_end(job)
        lines = slurm.output().partition(f"job {job}: 4 ranks on node[1-2], from ")[2]
        for node in ("node1", "node2"):
            found = re.findall(rf"from (/var/tmp/mpiddp-{job}-[0-9a-f]{{16}}) on {node}", lines)
            assert (len(found), len(set(found))) == (2, 1), slurm.output()
            left = slurm.hosts.cluster("run", node, "ls", "/var/tmp")
            assert f"mpiddp-{job}" not in left
        assert DIGEST.search(lines), slurm.output()
        return slurm.output()

    assert "packing" in train()
    assert "packing" not in train()  # nothing has changed
    (own / "others.pth").write_text(f"{packages}\n\n")
    assert "packing" in train()

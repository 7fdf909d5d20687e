"""Trials of GPU memory in MPI: a job that dies, hangs, adds garbage or never starts."""

import os
import re
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import simulated_gpu
import torch
from two_users import as_nobody, open_to_all

from mpiddp.transports import gpu_trial
from mpiddp.transports.gpu_choice import wait_napping
from mpiddp.transports.gpu_trial import RANKS, environment_of_a_job, trial

CPU = torch.device("cpu")


def script(folder: Path, source: str) -> list[str]:
    """Return the command of a program that does what a rank of the trial might do."""
    path = folder / "rank.py"
    started = f"print({gpu_trial.STARTED!r}, {RANKS}, flush=True)\n"
    path.write_text(
        "import os, signal, sys, time\n" + textwrap.dedent(source).replace("STARTED\n", started)
    )
    return [sys.executable, "-S", str(path)]


def passing(ranks: int) -> str:
    """Return source that prints what ranks print which have computed right sums."""
    line = f"print({gpu_trial.PASSED!r}, {ranks})\n"
    return "STARTED\n" + line * ranks


# A launcher that runs one process, in which all ranks speak: `env -n 2` would be refused.
LAUNCHER = """\
#!/bin/sh
shift 2
exec "$@"
"""


@pytest.fixture
def launcher(tmp_path: Path) -> str:
    path = tmp_path / "launch"
    path.write_text(LAUNCHER)
    path.chmod(0o755)
    return str(path)


@pytest.mark.once
class TestSurvival:
    def run(self, folder: Path, launcher: str, source: str, seconds: float = 20) -> tuple[int, str]:
        return trial(
            "ring", CPU, seconds=seconds, program=script(folder, source), launchers=[launcher]
        )

    def test_right_sums(self, tmp_path: Path, launcher: str) -> None:
        assert self.run(tmp_path, launcher, passing(RANKS)) == (RANKS, "")

    def test_crash(self, tmp_path: Path, launcher: str) -> None:
        source = "STARTED\nos.kill(os.getpid(), signal.SIGSEGV)"
        ranks, problem = self.run(tmp_path, launcher, source)
        assert ranks == 0
        assert problem == "it ended with signal 11 (Segmentation fault)"

    def test_crash_after_the_sums(self, tmp_path: Path, launcher: str) -> None:
        """Memory that is not let go of properly would end a job at its end as well."""
        source = passing(RANKS) + "sys.stdout.flush()\nos.kill(os.getpid(), signal.SIGABRT)"
        assert "signal 6" in self.run(tmp_path, launcher, source)[1]

    def test_hang(self, tmp_path: Path, launcher: str) -> None:
        """With children that outlive their parents, in process groups of their own."""
        source = f"""\
        STARTED
        if os.fork() == 0:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open({str(tmp_path / "child")!r}, "w").write(str(os.getpid()))
        time.sleep(60)
        """
        began = time.monotonic()
        ranks, problem = self.run(tmp_path, launcher, source, seconds=1)
        assert time.monotonic() - began < 10
        assert (ranks, problem) == (0, "it had not ended after 1 s")
        child = int((tmp_path / "child").read_text())
        for _ in range(100):
            if not Path(f"/proc/{child}/cmdline").exists() or not _runs(child):
                break
            time.sleep(0.05)
        assert not _runs(child)

    def test_error(self, tmp_path: Path, launcher: str) -> None:
        said = f"{gpu_trial.FAILED}RuntimeError: a sum is wrong"
        source = f"STARTED\nprint({said!r})\nprint('and so on')\nsys.exit(3)"
        ranks, problem = self.run(tmp_path, launcher, source)
        assert ranks == 0
        assert problem == "it ended with exit status 3: RuntimeError: a sum is wrong"

    def test_success_that_not_all_ranks_report(self, tmp_path: Path, launcher: str) -> None:
        source = f"STARTED\nprint({gpu_trial.PASSED!r}, {RANKS})\nprint('lost a rank')"
        ranks, problem = self.run(tmp_path, launcher, source)
        assert ranks == 0
        assert problem == "it ended with exit status 0: lost a rank"

    def test_nothing_can_be_started(self, tmp_path: Path) -> None:
        ranks, problem = trial(
            "ring", CPU, program=[str(tmp_path / "none")], launchers=[str(tmp_path / "no mpirun")]
        )
        assert ranks == 0
        assert "cannot be started" in problem
        assert "No such file" in problem

    def test_one_rank_where_no_launcher_works(self, tmp_path: Path) -> None:
        program = script(tmp_path, passing(1).replace("STARTED\n", ""))
        assert trial("ring", CPU, program=program, launchers=["/bin/false"]) == (1, "")

    def test_a_job_that_began_is_not_tried_again(self, tmp_path: Path, launcher: str) -> None:
        """What failed on two ranks is not excused by one rank on which nothing is added."""
        source = f"open({str(tmp_path / 'log')!r}, 'a').write('x')\nSTARTED\nsys.exit(1)"
        assert self.run(tmp_path, launcher, source)[0] == 0
        assert (tmp_path / "log").read_text() == "x"


def _runs(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.once
def test_a_job_of_its_own() -> None:
    given = {
        "PMI_RANK": "1",
        "PMIX_RANK": "1",
        "PMIX_NAMESPACE": "x",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_MCA_num_procs": "3",
        "SLURM_PROCID": "1",
        "HYDI_CONTROL_FD": "7",
        "PRTE_LAUNCHED": "1",
        "OMPI_MCA_osc": "^ucx",
        "PMIX_MCA_gds": "hash",
        "MPICH_GPU_SUPPORT_ENABLED": "1",
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTHONPATH": "/somewhere",
    }
    kept = environment_of_a_job(given)
    settings = (
        "OMPI_MCA_osc",
        "PMIX_MCA_gds",
        "MPICH_GPU_SUPPORT_ENABLED",
        "MPIR_CVAR_CH4_NETMOD",
        "CUDA_VISIBLE_DEVICES",
    )
    for name in settings:
        assert kept[name] == given[name]
    for name in given.keys() - {*settings, "PYTHONPATH"}:
        assert name not in kept
    assert kept["PYTHONPATH"] == "/somewhere"
    # A folder of this package there would hide modules of Python's own, such as 3.14's compression.
    assert "PYTHONPATH" not in environment_of_a_job({})
    assert kept["HYDRA_LAUNCHER"] == "fork"


@pytest.mark.slow  # and behind a thousand other tests mpirun once had not started it after 60 s
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("way", "sums", "problem"),
    [
        ("device", "", ""),
        ("ring", "wrong", "a sum of torch.float32 is wrong"),
        ("ring", "crash", "signal|exit status"),
        ("ring", "hang", "had not ended after 60 s"),
    ],
)
def test_beside_a_running_job(
    monkeypatch: pytest.MonkeyPatch, way: str, sums: str, problem: str
) -> None:
    """A job started from inside a job, with the MPI of this one; only its sums are simulated."""
    from mpi4py import MPI

    outcome = None
    if MPI.COMM_WORLD.rank == 0:
        monkeypatch.setenv("MPIDDP_SIMULATED_SUMS", sums)
        outcome = trial(way, CPU, runtime=(simulated_gpu.library(), "cuda"), seconds=60)
    wait_napping(MPI.COMM_WORLD)
    ranks, said = MPI.COMM_WORLD.bcast(outcome)
    assert ranks == (0 if problem else RANKS), said
    assert re.search(problem, said), said


@pytest.mark.once
def test_runs_nothing_that_others_have_put_into_shared_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /tmp, in which every user may put a torch.py."""
    evidence = tmp_path / "evidence"
    with open_to_all() as shared:
        for name in ("torch", "mpi4py", "mpiddp", "sitecustomize"):
            code = f"open({str(evidence)!r}, 'a').write({name!r})"
            write = f'echo "{code}" > "$1"'
            if os.geteuid() == 0:
                as_nobody(write, shared / f"{name}.py")
            else:
                (shared / f"{name}.py").write_text(code)
        monkeypatch.setattr(tempfile, "tempdir", str(shared))
        monkeypatch.setenv("TMPDIR", str(shared))
        monkeypatch.chdir(shared)
        ranks, problem = trial("device", CPU, seconds=60, launchers=[])
        monkeypatch.undo()
    assert not evidence.exists(), evidence.read_text()
    assert (ranks, "No module" in problem) == (1, False), problem

"""The console command `mpiddp`: what it runs, and what it says where mpiddp cannot be imported."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import mpirun
import pytest
from script_runs import clean_environment

import mpiddp
import mpiddp_command
from mpiddp import launchers

COMMAND = Path(sys.executable).parent / "mpiddp"
ROOT = Path(__file__).parents[2]

# As a command, and as a module.
DOCTORS = [[COMMAND, "doctor"], [sys.executable, "-m", "mpiddp.doctor"]]

pytestmark = pytest.mark.timeout(100)


def run(
    *arguments: str | Path, folder: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return start([COMMAND, *arguments], folder, env)


def start(
    command: Sequence[str | Path], folder: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**clean_environment(), "OMP_NUM_THREADS": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    print(done.stdout, done.stderr)  # pytest shows it when a test fails
    return done


@pytest.mark.once
class TestWithoutThePackage:
    """What is quick: neither torch nor MPI is loaded."""

    def test_version(self) -> None:
        done = run("--version", folder=ROOT)
        assert (done.returncode, done.stdout, done.stderr) == (
            0, f"mpiddp {mpiddp.__version__}\n", "",
        )  # fmt: skip

    @pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
    def test_help(self, arguments: list[str]) -> None:
        done = run(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        for name in (*mpiddp_command._COMMANDS, "launch"):
            assert f"mpiddp {name}" in done.stdout

    def test_wrong_command(self) -> None:
        done = run("train.py")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "mpiddp: there is no command 'train.py': run, doctor, top, flight-recorder, report or "
            "launch\n"
        )

    @pytest.mark.parametrize("arguments", ["--version", "--help", "nonsense"])
    def test_nothing_is_loaded(self, arguments: str) -> None:
        program = f"""
import sys, mpiddp_command
sys.argv = ["mpiddp", {arguments!r}]
mpiddp_command.main()
print([name for name in ("mpiddp", "torch", "mpi4py") if name in sys.modules])
"""
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.splitlines()[-1] == "[]"

    def test_one_rank_speaks(self) -> None:
        assert run("--version", env={"PMI_RANK": "1"}).stdout == ""
        assert run("--version", env={"OMPI_COMM_WORLD_RANK": "0", "PMI_RANK": "1"}).stdout != ""
        assert (*launchers.RANKS, launchers.SCHEDULER_RANK) == mpiddp_command._RANKS


@pytest.mark.once
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("run", "usage: mpirun -n N mpiddp run [options] (SCRIPT | -m MODULE | -c CODE)"),
        ("doctor", "usage: mpiddp doctor [-h] [--json]"),
        ("flight-recorder", "usage: mpiddp flight-recorder [-h]"),
        ("top", "usage: mpiddp top [-h] [--json] [--once]"),
        ("report", "usage: mpiddp report [-h]"),
    ],
)
def test_help_of_a_command(command: str, said: str) -> None:
    done = run(command, "--help", folder=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(said)


@pytest.mark.once
def test_flight_recorder(tmp_path: Path) -> None:
    done = run("flight-recorder", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("mpiddp.flight_recorder: ")


def test_run_under_mpirun(tmp_path: Path) -> None:
    """As `python -m mpiddp`: the script's folder comes first on the path, not the working one."""
    (tmp_path / "beside.py").write_text("name = 'beside the script'\n")
    script = tmp_path / "train.py"
    script.write_text(
        """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from beside import name
dist.init_process_group("nccl")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
print(dist.get_rank(), type(model).__module__, name, sys.argv[1:], flush=True)
dist.destroy_process_group()
"""
    )
    command = [mpirun.find(), "-n", "2", str(COMMAND), "run", str(script), "--epochs", "5"]
    done = mpirun.run_command(command, 80)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} mpiddp beside the script ['--epochs', '5']" for rank in (0, 1)
    ]
    assert done.stderr.startswith("mpiddp: 2 ranks, replaced: ")


@pytest.mark.once
def test_run_a_module_of_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.path[0], sys.argv[1:])\n")
    done = run("run", "-m", "program", "x", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path} ['x']\n")


@pytest.mark.once
class TestRefusals:
    """What an import refuses is said in a sentence, once, and not as a traceback."""

    ENVIRONMENT: ClassVar = {"MPI4PY_LIBMPI": "/no/such/libmpi.so"}
    TEXT = "mpi4py finds no MPI library to load: "

    @pytest.mark.thorough(keep=1)
    @pytest.mark.parametrize("arguments", [["run", "-c", ""], ["doctor"]])
    def test_sentence(self, arguments: list[str]) -> None:
        done = run(*arguments, env=self.ENVIRONMENT)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"mpiddp: {self.TEXT}")
        assert "Traceback" not in done.stderr

    def test_the_doctor_as_a_module(self) -> None:
        """Python imports the package before it, so the package says it in its place."""
        as_module = start([sys.executable, "-m", "mpiddp.doctor"], env=self.ENVIRONMENT)
        assert as_module.returncode == 1
        assert as_module.stderr.startswith(f"mpiddp: {self.TEXT}")
        command = run("doctor", env=self.ENVIRONMENT)
        assert (as_module.stdout, as_module.stderr) == ("", command.stderr)

    @pytest.mark.parametrize("command", DOCTORS)
    def test_as_json(self, command: list[str | Path]) -> None:
        done = start([*command, "--json"], env=self.ENVIRONMENT)
        assert (done.returncode, done.stderr) == (1, "")
        told = json.loads(done.stdout)
        assert told["grade"] == "error"
        (finding,) = told["findings"]
        assert finding["text"].startswith(self.TEXT)
        assert "MPI4PY_LIBMPI" in finding["remedy"]

    @pytest.mark.thorough
    @pytest.mark.parametrize("command", DOCTORS)
    def test_other_ranks_are_silent(self, command: list[str | Path]) -> None:
        done = start(command, env={**self.ENVIRONMENT, "OMPI_COMM_WORLD_RANK": "1"})
        assert (done.returncode, done.stdout, done.stderr) == (1, "", "")

    @pytest.mark.thorough
    @pytest.mark.parametrize("command", DOCTORS)
    def test_other_errors_keep_their_traceback(
        self, command: list[str | Path], tmp_path: Path
    ) -> None:
        (tmp_path / "torch.py").write_text("raise ImportError('broken')\n")
        done = start(command, env={"PYTHONPATH": str(tmp_path)})
        assert done.returncode == 1
        assert "Traceback" in done.stderr

    @pytest.mark.thorough
    def test_a_program_of_that_argument_gets_the_error(self, tmp_path: Path) -> None:
        """It may catch it: only the doctor's own start says a sentence and ends."""
        (tmp_path / "program.py").write_text("import mpiddp\n")
        command = [sys.executable, "-m", "program", "mpiddp.doctor"]
        done = start(command, tmp_path, self.ENVIRONMENT)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(f"ImportError: {self.TEXT}")

"""In the root of a clone the installed package runs, not the folder of sources that hides it."""

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import mpirun
import pytest
from script_runs import clean_environment

import mpiddp
from mpiddp import source_folder

ROOT = Path(__file__).parents[2]
INSTALLED = Path(mpiddp.__file__).parent

pytestmark = [pytest.mark.timeout(100), pytest.mark.once]

WHERE = "import mpiddp, sys; print(mpiddp.__file__, sys.modules['mpiddp.settings'].__file__)"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a copy of what a clone has, without what is built there."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("mpiddp", "cython"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.c")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "mpiddp_children.py", "mpiddp_command.py"):
        shutil.copy2(ROOT / name, folder)
    return folder


def run(
    folder: Path,
    *arguments: str,
    python: str | Path = sys.executable,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [python, *arguments],
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


def test_import(clone: Path) -> None:
    done = run(clone, "-c", WHERE)
    assert done.stderr == ""
    assert done.stdout == f"{INSTALLED / '__init__.py'} {INSTALLED / 'settings.py'}\n"


@pytest.mark.thorough
def test_import_of_a_module(clone: Path) -> None:
    program = "from mpiddp.mpi.nodes import Topology; import mpiddp.mpi.library, sys, mpiddp.ddp"
    then = "; print(sys.modules['mpiddp.mpi.nodes'].__file__, mpiddp.Topology is Topology)"
    done = run(clone, "-c", program + then)
    assert (done.stdout, done.stderr) == (f"{INSTALLED / 'mpi' / 'nodes.py'} True\n", "")


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("module", "option", "said"),
    [
        ("mpiddp", "--version", f"mpiddp {mpiddp.__version__}\n"),
        ("mpiddp.doctor", "--help", "usage: python -m mpiddp.doctor"),
        ("mpiddp.flight_recorder", "--help", "usage: python -m mpiddp.flight_recorder"),
        ("mpiddp.report", "--help", "usage: python -m mpiddp.report"),
    ],
)
def test_programs(clone: Path, module: str, option: str, said: str) -> None:
    # None of them is in the folder: what runs is what is installed.
    for name in ("__main__.py", "doctor.py", "flight_recorder/__main__.py"):
        (clone / "mpiddp" / name).write_text("raise SystemExit('of the folder')\n")
    # Who speaks is rank 0; the others do not tell that the sources differ.
    done = run(clone, "-m", module, option)
    assert done.returncode == 0
    assert done.stdout.startswith(said)


def test_pickles_and_processes(clone: Path, tmp_path: Path) -> None:
    """What is pickled there is the same class, and a process that is started imports the same."""
    script = tmp_path / "program.py"
    script.write_text(
        """
import multiprocessing, pathlib, pickle, sys
import mpiddp

def child(queue):
    queue.put(mpiddp.__file__)

if __name__ == "__main__":
    topology = mpiddp.Topology(0, 1, 0, 1, 0, 1)
    pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(topology))
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(queue.get())
        process.join()
"""
    )
    env = {"PYTHONPATH": str(clone)}
    done = run(tmp_path, str(script), str(tmp_path / "pickled"), env=env)
    assert done.stderr == ""
    assert done.stdout.split() == [str(INSTALLED / "__init__.py")] * 2
    assert pickle.loads((tmp_path / "pickled").read_bytes()) == mpiddp.Topology(0, 1, 0, 1, 0, 1)


@pytest.mark.thorough
def test_under_mpirun(clone: Path) -> None:
    program = "import mpiddp; mpiddp.init_process_group(); print(mpiddp.__file__)"
    done = mpirun.run(2, ["-c", f"{program}; mpiddp.destroy_process_group()"], 80,
                      {"PYTHONPATH": str(clone)})  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(INSTALLED / "__init__.py")] * 2


class TestChanges:
    """A developer who has edited a file and has not installed it is told, by rank 0, in a line."""

    @pytest.mark.parametrize("rank", [0, 1])
    def test_edited(self, clone: Path, rank: int) -> None:
        name = "mpiddp/ddp/hooks.py"
        with (clone / name).open("a") as file:
            file.write("# another line\n")
        done = run(clone, "-c", WHERE, env={"PMI_RANK": str(rank)})
        assert done.stdout.startswith(str(INSTALLED))
        line = (
            f"mpiddp: {INSTALLED} runs, and the sources beside {clone / 'mpiddp'} differ from it "
            f"({name}). To run them: make build, or {sys.executable} -m pip install {clone}\n"
        )
        assert done.stderr == ("" if rank else line)

    def said(self, clone: Path, capsys: pytest.CaptureFixture[str]) -> str:
        source_folder._tell_changes(clone / "mpiddp", INSTALLED)
        return capsys.readouterr().err

    def test_none(self, clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.said(clone, capsys) == ""

    @pytest.mark.parametrize("name", ["mpi/library.pyx", "system/kernels.h"])
    def test_what_is_compiled(
        self, clone: Path, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        os.utime(clone / "cython" / name)
        assert f"(cython/{name})" in self.said(clone, capsys)

    def test_interface(self, clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (clone / "cython" / "mpi" / "library.pxd").write_text("")
        assert "(cython/mpi/library.pxd)" in self.said(clone, capsys)

    def test_new_and_removed(self, clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (clone / "mpiddp" / "ddp" / "new.py").touch()
        (clone / "mpiddp" / "version.py").unlink()
        assert "(mpiddp/ddp/new.py and 1 more)" in self.said(clone, capsys)


class TestNothingInstalled:
    @pytest.fixture
    def python(self, tmp_path: Path) -> Path:
        """Return a Python that has no packages."""
        bare = tmp_path / "bare"
        run(tmp_path, "-m", "venv", "--without-pip", str(bare))
        return bare / "bin" / "python"

    def test_in_a_clone(self, clone: Path, python: Path) -> None:
        done = run(clone, "-c", "import mpiddp", python=python)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            f"ImportError: mpiddp is not compiled in {clone / 'mpiddp'}, and {python} has none "
            f"installed. Install it: {python} -m pip install {clone}"
        )

    def test_in_an_installation_that_is_not_complete(self, clone: Path, python: Path) -> None:
        (clone / "setup.py").unlink()
        done = run(clone, "-c", "import mpiddp", python=python)
        assert done.stderr.splitlines()[-1].startswith(
            f"ImportError: mpiddp is not complete in {clone / 'mpiddp'}: its compiled modules are "
            f"missing, or are those of another Python than {python}."
        )

    def test_another_clone_is_none(self, clone: Path, tmp_path: Path, python: Path) -> None:
        shutil.copytree(clone, tmp_path / "other")
        env = {"PYTHONPATH": f"{tmp_path / 'other'}{os.pathsep}{clone}"}
        done = run(tmp_path, "-c", "import mpiddp", python=python, env=env)
        assert f"mpiddp is not compiled in {tmp_path / 'other' / 'mpiddp'}, and" in done.stderr

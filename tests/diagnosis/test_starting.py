"""Where the environment lies: which filesystem a path is on, and from when that is a warning."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpiddp.diagnosis.starting import FROM_RANKS, Mount, calls_of_a_start, describe, mount_of

pytestmark = pytest.mark.once

# As Linux writes it; the last one on a folder is the one that is seen.
MOUNTS = """\
22 1 0:2 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /net/home rw,relatime shared:5 - nfs4 server:/home rw,vers=4.2
31 22 0:41 / /net/my\\040data rw - lustre 10.0.0.1@tcp:/data rw
32 30 0:42 / /net/home/cache rw - tmpfs tmpfs rw
33 22 0:43 / /twice rw - ext4 /dev/vdb rw
34 33 0:44 / /twice rw - fuse.glusterfs server rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/usr/lib/x", Mount("/", "ext4")),
        ("/net/home/me/venv", Mount("/net/home", "nfs4")),
        ("/net/homes", Mount("/", "ext4")),
        ("/net/home/cache/venv", Mount("/net/home/cache", "tmpfs")),
        ("/net/my data/venv", Mount("/net/my data", "lustre")),
        ("/twice/x", Mount("/twice", "fuse.glusterfs")),
    ],
)
def test_the_filesystem_of_a_path(path: str, expected: Mount) -> None:
    assert mount_of(Path(path), MOUNTS) == expected


def test_here(tmp_path: Path) -> None:
    assert mount_of(Path("/proc/self/status")) == Mount("/proc", "proc")
    link = tmp_path / "link"
    link.symlink_to("/proc/self/status")
    assert mount_of(link).kind == "proc"


@pytest.mark.essential
def test_from_when_it_is_a_warning() -> None:
    folder = Path("/net/home/me/venv")
    (few,) = describe(folder, {"nfs4"}, 1290, FROM_RANKS - 1)
    (local,) = describe(folder, {"ext4", "tmpfs", "overlay"}, 1290, 1000)
    assert few.grade == local.grade == "ok"
    (many,) = describe(folder, {"nfs4", "ext4"}, 1290, 1000)
    assert many.grade == "warning"
    assert many.text == (
        "environment: /net/home/me/venv; a rank imports 1290 files, from ext4, nfs4: all 1000 "
        "ranks ask nfs4 for them at once, and wait"
    )
    assert "slurm/train_packed.sbatch" in many.remedy


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace counts what is compared")
def test_calls_of_a_start(tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    command = ["strace", "-f", "-e", "trace=%file", "-o", str(counts)]
    command += [sys.executable, "-c", "import torch, mpiddp"]
    if subprocess.run(command, capture_output=True, timeout=100, check=False).returncode:
        pytest.skip("strace may not look into processes here")
    # Not those of a file that is open already, which name none.
    lines = [line for line in counts.read_text().splitlines() if ', "", ' not in line]
    assert calls_of_a_start() == pytest.approx(len(lines), rel=0.05)

"""A torch that is newer than the newest tested: one warning, and it goes on."""

import subprocess
from pathlib import Path

import mpirun
import pytest
import torch

from mpiddp.torch_internals.versions import NEWEST_TESTED, OLDEST_TESTED, release_of

pytestmark = [pytest.mark.once, pytest.mark.timeout(90)]

PROGRAM = """\
import torch
torch.__version__ = {version!r}
import mpiddp
from mpiddp import DistributedDataParallel as DDP
for _ in range(2):
    mpiddp.init_process_group()
    DDP(torch.nn.Linear(2, 1))(torch.ones(1, 2)).sum().backward()
    mpiddp.destroy_process_group()
"""


def run(folder: Path, version: str) -> "subprocess.CompletedProcess[str]":
    script = folder / "script.py"
    script.write_text(PROGRAM.format(version=version))
    return mpirun.run(2, [script], timeout=80)


@pytest.mark.thorough
def test_a_newer_torch_is_told_once_with_both_versions(tmp_path: Path) -> None:
    done = run(tmp_path, "99.1.0+cpu")
    assert done.returncode == 0
    assert done.stderr.count("UserWarning: mpiddp ") == 1
    assert f"tested with torch up to {NEWEST_TESTED}, and this is torch 99.1.0+cpu" in done.stderr


@pytest.mark.thorough
def test_a_tested_torch_is_not(tmp_path: Path) -> None:
    done = run(tmp_path, NEWEST_TESTED)
    assert done.returncode == 0
    assert "UserWarning" not in done.stderr


def test_the_installed_torch_is_among_the_tested() -> None:
    assert release_of(OLDEST_TESTED) <= release_of(torch.__version__) <= release_of(NEWEST_TESTED)


def test_releases() -> None:
    assert release_of("2.15.0+cu132") == release_of("2.15.0a0") == (2, 15, 0)
    assert release_of("2.9.1") < release_of("2.11.0")

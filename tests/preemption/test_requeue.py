"""preemption.requeue: what it asks of SLURM, and what it says if SLURM refuses.

tests/project/test_slurm.py lets a real SLURM start a job again.
"""

from pathlib import Path

import pytest

from mpiddp import preemption

pytestmark = pytest.mark.once


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the program is that stands in for SLURM's."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    return tmp_path / "scontrol"


def become(program: Path, source: str) -> None:
    program.write_text(f"#!/bin/sh\n{source}\n")
    program.chmod(0o755)


@pytest.mark.essential
def test_asks_for_this_job(scontrol: Path) -> None:
    become(scontrol, f'echo "$@" > {scontrol}.heard')
    assert preemption.requeue()
    assert Path(f"{scontrol}.heard").read_text() == "requeue 4711\n"


def test_refused(scontrol: Path) -> None:
    said = "slurm_requeue error: Requested operation is presently disabled"
    become(scontrol, f"echo '{said}' >&2\nexit 1")
    with pytest.raises(
        RuntimeError, match=r"^job 4711 cannot be requeued: slurm_requeue error: Requested"
    ):
        preemption.requeue()


def test_no_scontrol(scontrol: Path) -> None:
    with pytest.raises(RuntimeError, match=r"job 4711 cannot be requeued: .*'scontrol'"):
        preemption.requeue()


def test_outside_of_slurm(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    become(scontrol, f"touch {scontrol}.heard")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert not preemption.requeue()
    assert not Path(f"{scontrol}.heard").exists()

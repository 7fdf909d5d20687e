"""preemption.requeue: what it asks of SLURM, and what it makes of SLURM's answers.

test_slurm_ends.py and tests/project/test_slurm.py let a real SLURM start jobs again.
"""

from pathlib import Path

import pytest

from mpiddp import preemption

pytestmark = pytest.mark.once

RUNNING = "JobId=4711 JobState=RUNNING Reason=None Restarts=0 EndTime=Unknown PreemptTime=None"


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the program is that stands in for SLURM's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "scontrol"


def become(program: Path, source: str, job: str = RUNNING) -> None:
    """Answer for a job; `source` is what is done to requeue it."""
    heard = f'echo "$@" >> {program}.heard'
    program.write_text(
        f'#!/bin/sh\ncase "$*" in\n*"show job"*) echo "{job}";;\n*"show step"*) ;;\n'
        f"*) {heard}\n{source}\n;;\nesac\n"
    )
    program.chmod(0o755)


def heard(program: Path) -> str:
    path = Path(f"{program}.heard")
    return path.read_text() if path.exists() else ""


@pytest.mark.essential
def test_asks_for_this_job(scontrol: Path) -> None:
    become(scontrol, "true")
    assert preemption.requeue()
    assert heard(scontrol) == "requeue 4711\n"


def test_asks_for_this_task_of_an_array(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own number would be that of the whole array."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    become(scontrol, "true")
    assert preemption.requeue()
    assert heard(scontrol) == "requeue 4711_3\n"


@pytest.mark.parametrize(
    ("changed", "again", "asked"),
    [
        ("JobState=COMPLETING", False, False),
        ("JobState=CANCELLED", False, False),
        ("JobState=COMPLETING Restarts=1", True, False),
        ("JobState=PENDING", True, False),
        ("JobState=COMPLETING Reason=TimeLimit", True, True),
        ("JobState=TIMEOUT", True, True),
        ("JobState=COMPLETING PreemptTime=2026-01-01T00:00:00", True, True),
        ("JobState=PREEMPTED", True, True),
        ("JobState=RUNNING EndTime=2020-01-01T00:00:00", True, True),
    ],
)
def test_the_state_of_the_job_decides(
    scontrol: Path, capfd: pytest.CaptureFixture[str], changed: str, again: bool, asked: bool
) -> None:
    told = dict(word.split("=") for word in f"{RUNNING} {changed}".split())
    become(scontrol, "true", " ".join(f"{name}={value}" for name, value in told.items()))
    assert preemption.requeue() is again
    assert heard(scontrol) == ("requeue 4711\n" if asked else "")
    assert ("job 4711 has been cancelled" in capfd.readouterr().err) == (not again)


def test_refused(scontrol: Path) -> None:
    said = "slurm_requeue error: Requested operation is presently disabled"
    become(scontrol, f"echo '{said}' >&2\nexit 1")
    with pytest.raises(
        RuntimeError, match=r"^job 4711 cannot be requeued: slurm_requeue error: Requested"
    ):
        preemption.requeue()


def test_refused_because_it_was_done_meanwhile(scontrol: Path) -> None:
    again = RUNNING.replace("Restarts=0", "Restarts=1")
    become(scontrol, f"sed -i 's/{RUNNING}/{again}/' {scontrol}\nexit 1")
    assert preemption.requeue()


def test_no_scontrol(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(scontrol.parent))
    with pytest.raises(RuntimeError, match=r"job 4711 cannot be requeued: .*'scontrol'"):
        preemption.requeue()


def test_outside_of_slurm(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    become(scontrol, "true")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert not preemption.requeue()
    assert heard(scontrol) == ""

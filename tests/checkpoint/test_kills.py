"""A process that saves is killed at random moments: what is loaded is always a whole state."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from script_runs import SCRIPTS


@pytest.mark.thorough(keep=1)
@pytest.mark.essential(keep=1)
@pytest.mark.timeout(300)
@pytest.mark.once
@pytest.mark.parametrize(
    ("how", "kills"),
    [
        ("save", 25),
        ("async_save", 25),
        pytest.param("save", 200, marks=pytest.mark.slow),
        pytest.param("async_save", 200, marks=pytest.mark.slow),
    ],
)
def test_a_whole_state(how: str, kills: int, tmp_path: Path) -> None:
    script = SCRIPTS / "save_until_killed.py"
    command = [sys.executable, script, tmp_path / "all", str(kills), "1", how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    # It has met saves halfway, and there were checkpoints to load.
    assert said["halfway"] > kills // 10
    assert said["steps"][-1] > kills // 10
    assert "damaged" not in done.stderr

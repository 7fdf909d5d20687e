"""What passes a rank's output on, beside it."""

import subprocess
import sys
from pathlib import Path

import pytest

TAGGED = """
import os, sys
os.environ["PYTHONPATH"] = os.getcwd()
from mpiddp.runner import output
output.send_tagged("[7] ")
print("hello", flush=True)
output.release()
"""


@pytest.mark.once
def test_the_relay_runs_nothing_of_other_folders(tmp_path: Path) -> None:
    """Neither of those in PYTHONPATH nor of the working one: it knows Python's own modules only."""
    evidence = tmp_path / "evidence"
    for name in ("selectors", "array", "termios", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(evidence)!r}, 'a').write({name!r})\n")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "script.py"
    script.write_text(TAGGED)
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "[7] hello\n", done.stderr
    assert not evidence.exists(), evidence.read_text()

"""What Linux shows of the job's processes on this node.

Each test starts processes of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpiddp.rendezvous import launched_here


def test_a_process_that_ends_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank is unknown then, as if it had ended before."""
    environment = {**os.environ, "OMPI_COMM_WORLD_RANK": "7", "PMIX_NAMESPACE": "a job"}
    monkeypatch.setenv("PMIX_NAMESPACE", "a job")
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    look_at = launched_here._look_at

    def too_late(folder: Path) -> launched_here.LaunchedProcess:
        if folder.name == str(child.pid):
            child.kill()
            child.wait()
        return look_at(folder)

    with child:
        assert child.stdout is not None
        child.stdout.readline()
        assert launched_here.find()[7].number == child.pid
        monkeypatch.setattr(launched_here, "_look_at", too_late)
        assert 7 not in launched_here.find()

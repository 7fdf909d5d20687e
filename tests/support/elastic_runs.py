"""Run scripts that train under mpiddp.elastic, and read what their ranks say."""

import json
import subprocess

import mpirun
import pytest
from script_runs import SCRIPTS

import mpiddp

OPEN_MPI = mpiddp.compiled_against()[0] == "Open MPI"
needs_ulfm = pytest.mark.skipif(not OPEN_MPI, reason="only Open MPI goes on without a rank")


def start(
    ranks: int, script: str, *arguments: str, limit: float = 100, lossy: bool = True, **env: str
) -> "subprocess.CompletedProcess[str]":
    """Run a script to its end; if `lossy`, so that ranks may be lost, where the MPI can."""
    options = ["--with-ft", "ulfm", "--mca", "btl", "self,tcp"] if OPEN_MPI and lossy else []
    python = [mpirun.sys.executable, str(SCRIPTS / script), *arguments]
    command = [mpirun.find(), *options, "-n", str(ranks), *python]
    done = mpirun.run_command(command, timeout=limit, env=env)
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    return done


def train(
    ranks: int, steps: int, *arguments: str, limit: float = 100, **env: str
) -> "subprocess.CompletedProcess[str]":
    """Run elastic_training.py."""
    return start(ranks, "elastic_training.py", str(steps), *arguments, limit=limit, **env)


def said(done: "subprocess.CompletedProcess[str]") -> "list[dict]":
    """Return what the ranks said that came to the end, if all have the same bits."""
    ended = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len({each["bits"] for each in ended}) == 1
    return sorted(ended, key=lambda each: each["rank"])

"""A machine as a reader of the pages finds it: a user who is not root, and an empty home.

It is an overlay over this machine (tests/lab/site), with Debian's MPIs as modules and a real SLURM.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from slurm_lab import reason_to_skip

__all__ = ["HOME", "Site", "start_site"]

ROOT = Path(__file__).resolve().parents[2]
HOME = Path("/home/reader")
# What is no part of a clone, or large.
NO_SOURCE = (".*", "build", "dist", "*.egg-info", "__pycache__", "shared", "venv")
# Debian's packages are fetched and unpacked.
SETTING_UP = 600
# Of apt's words where it reaches no registry.
NOT_FETCHED = re.compile("Unable to fetch|Unable to locate package|Failed to fetch")


class Site:
    """The machine, while it lives. Its folder is seen from outside, too.

    Args:
        folder: below /tmp, which the machine and its SLURM's hosts have in common.
        process: its first one, which has its namespaces.
    """

    def __init__(self, folder: Path, process: int) -> None:
        self.folder = folder
        self._enter = ["nsenter", f"--target={process}", "--mount", "--pid", "--wdns=/"]

    def as_root(self, *command: str | Path) -> None:
        """Run a command there that must succeed."""
        done = subprocess.run(
            [*self._enter, *map(str, command)],
            env={**os.environ, "LAB_DIR": str(self.folder / "lab")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    def clone(self, name: str) -> Path:
        """Lay a copy of the source into the reader's home; return its path there."""
        copy = self.folder / "home" / "reader" / name
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NO_SOURCE))
        self.as_root("chown", "-R", "reader:", HOME / name)
        return HOME / name

    def log_in(self, script: Path, env: Mapping[str, str], timeout: float) -> int:
        """Run a script in the reader's shell, as one that has just logged in; return its status.

        Its output is in the file beside the script that ends with .log. When `timeout` seconds are
        over, all that the reader has started is killed.
        """
        # How this machine's pip reaches its packages is no matter of the pages.
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        set_env = {"HOME": str(HOME), "USER": "reader", "LANG": "C.UTF-8", **pip, **env}
        user = ["setpriv", "--reuid=reader", "--regid=reader", "--init-groups"]
        variables = [f"{name}={value}" for name, value in set_env.items()]
        with script.with_suffix(".log").open("w") as log:
            shell = subprocess.Popen(
                [*self._enter, *user, "env", "-i", *variables, "bash", "-l", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                return shell.wait(timeout)
            except subprocess.TimeoutExpired:
                self.as_root("pkill", "-KILL", "-u", "reader")
                shell.wait()
                return 124

    def start_slurm(self, nodes: int) -> None:
        """Start a SLURM with so many nodes of four cores. It ends with the machine."""
        lab = str(ROOT / "tests" / "lab" / "cluster")
        self.as_root(lab, "up", str(nodes), "--cpus", "4", "--slurm")


@contextlib.contextmanager
def start_site() -> Iterator[Site]:
    """Make the machine; skip the test where that cannot be."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    with tempfile.TemporaryDirectory(prefix="mpiddp-site-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        script = ROOT / "tests" / "lab" / "site"
        namespaces = ["--mount", "--propagation=private", "--pid", "--fork", "--mount-proc"]
        command = ["unshare", *namespaces, "--kill-child", script, folder, python]
        with (folder / "site.log").open("w") as log:
            # It ends, with all that runs there, when this process closes the pipe or is killed.
            process = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.PIPE, stdout=log, stderr=log
            )
            try:
                deadline = time.monotonic() + SETTING_UP
                while not (folder / "ready").exists():
                    ended = process.poll() is not None or time.monotonic() > deadline
                    last = (folder / "site.log").read_text().splitlines()[-10:]
                    if ended and any(map(NOT_FETCHED.search, last)):
                        pytest.skip("Debian's packages cannot be fetched here")
                    assert not ended, f"{shlex.join(map(str, command))}:\n" + "\n".join(last)
                    time.sleep(0.2)
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
                yield Site(folder, int(children.read_text()))
            finally:
                process.communicate(timeout=60)

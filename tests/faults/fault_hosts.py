"""Hosts for jobs that meet a fault: tests/lab, with a real SLURM, until this process ends."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from script_runs import clean_environment

__all__ = ["NODES", "Lab", "Labs", "NoSlurmError", "reason_without", "shared_files"]

NODES = ("node1", "node2")

_CLUSTER = Path(__file__).resolve().parents[1] / "lab" / "cluster"
# More than two cores, for several jobs at once.
_CPUS = 64
# As it is at the start: pytest changes it while threads start hosts.
_INHERITED = clean_environment()
# What Open MPI and MPICH leave behind when they are killed is not ours to judge.
_OF_MPI = ("sm_segment", "vader_segment", "mpich_sh", "ucx_shm", "nvshmem", "pmix")


@functools.cache
def reason_without(slurm: bool) -> str:
    """Return why there can be no hosts here, or none with SLURM; "" if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts are made of Linux namespaces, which needs root"
    needed = ("slurmctld", "slurmd", "srun", "munged", "ip") if slurm else ("ip",)
    if not shutil.which("apt-get") and not all(map(shutil.which, needed)):
        return f"not all of {', '.join(needed)} are here, and there is no apt-get"
    probe = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
    try:
        subprocess.run([*probe, "true"], capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"namespaces cannot be made here: {error}"
    return ""


def shared_files(host: Path = Path("/")) -> set[str]:
    """Return the names of files in shared memory, without those of MPI libraries themselves."""
    names = os.listdir(host / "dev" / "shm")
    return {name for name in names if not name.startswith(_OF_MPI)}


class NoSlurmError(Exception):
    """There is no SLURM, and none can be installed."""


class Lab:
    """Two nodes and a head.

    Args:
        folder: for its files, common to all hosts.
        slurm: whether SLURM runs there.

    Raises:
        NoSlurmError: SLURM is not here, and cannot be installed.
    """

    def __init__(self, folder: Path, slurm: bool) -> None:
        self.folder = folder / "lab"
        self.environment = {**_INHERITED, "LAB_DIR": str(self.folder)}
        for name in [name for name in self.environment if name.startswith(("PRTE_", "MPIR_"))]:
            del self.environment[name]
        # The hosts go when this process closes the pipe, even by being killed.
        self._guard = subprocess.Popen(
            ["bash", "-c", 'cat; "$0" clear; "$0" down', str(_CLUSTER)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        options = ["--cpus", str(_CPUS), *(["--slurm"] if slurm else [])]
        try:
            self.command("up", str(len(NODES)), *options, limit=200)
        except RuntimeError as error:
            self.down()
            if slurm and not shutil.which("slurmctld"):
                raise NoSlurmError(f"SLURM's packages cannot be installed: {error}") from error
            raise

    def command(self, *arguments: str, limit: float = 60) -> str:
        """Run the lab's command; return what it printed."""
        # The command goes on in namespaces: only timeout(1) can end it whole.
        done = subprocess.run(
            ["timeout", "-k", "5", str(limit), *self.words(*arguments)],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"cluster {' '.join(arguments)}: {done.returncode}\n{done.stderr}")
        return done.stdout

    def words(self, *arguments: str) -> list[str]:
        """Return the lab's command as it is written."""
        return [str(_CLUSTER), *arguments]

    def runs(self, process: int, node: str) -> bool:
        """Return whether a process, by its number out here, runs on a node."""
        try:
            first = (self.folder / "pids" / node).read_text().strip()
            namespaces = [os.readlink(f"/proc/{each}/ns/pid") for each in (process, first)]
        except OSError:
            return False
        return namespaces[0] == namespaces[1]

    def shared_files(self) -> set[str]:
        """Return what lies in the shared memory of the nodes that are on."""
        found = set()
        for node in NODES:
            with contextlib.suppress(OSError):
                first = (self.folder / "pids" / node).read_text().strip()
                found |= shared_files(Path("/proc") / first / "root")
        return found

    def down(self) -> None:
        """End all hosts, and what runs there."""
        self._guard.communicate(timeout=60)


class Labs:
    """Labs of one run of tests: one that jobs share, and one for each fault of a host."""

    def __init__(self) -> None:
        # In /tmp whatever TMPDIR is: the hosts have it in common.
        self._folder = tempfile.TemporaryDirectory(prefix="mpiddp-faults-", dir="/tmp")
        self._shared: Lab | None = None
        self._lock = threading.Lock()
        self._made = 0

    def shared(self) -> Lab:
        """Return the lab for jobs whose hosts stay as they are."""
        with self._lock:
            if self._shared is None:
                self._shared = self._make(slurm=True)
            return self._shared

    @contextlib.contextmanager
    def own(self, slurm: bool) -> Iterator[Lab]:
        """Make a lab for one job: SLURM takes half a minute to believe in a node again."""
        with self._lock:
            lab = self._make(slurm)
        try:
            yield lab
        finally:
            lab.down()

    def _make(self, slurm: bool) -> Lab:
        self._made += 1
        folder = Path(self._folder.name) / str(self._made)
        folder.mkdir()
        return Lab(folder, slurm)

    def close(self) -> set[str]:
        """End what is left; return what was in the shared memory of the hosts that jobs shared."""
        files = set()
        if self._shared is not None:
            files = self._shared.shared_files()
            self._shared.down()
        self._folder.cleanup()
        return files

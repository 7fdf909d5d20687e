"""Start a job that meets a fault, and see how it ends and what it leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import patience
from fault_hosts import NODES, Lab
from fault_starts import launch

__all__ = ["HOST_FAULTS", "Outcome", "run"]

_NAP = 0.05
_MARK = "MPIDDP_TEST_JOB"
_SCRIPT = b"fault.py"
# The last rank runs on the last node.
_NODE = NODES[-1]
# What the lab does for each fault of a host, and for its end.
HOST_FAULTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "link-cut": (("link", _NODE, "down"), ("link", _NODE, "up")),
    "node-frozen": (("freeze", _NODE), ("thaw", _NODE)),
    "node-off": (("off", _NODE), ()),
}
# Seconds until all ranks have begun: each takes some of a core, and more where others do, too.
_START = 90
# Their limit for MPI_Init, where the first one waits for the last.
_START_LIMIT = 15
# Seconds in which the processes of a host end that is there again.
_AFTERWARDS = 40


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        met: whether the fault was met.
        status: of its launcher.
        said: all that it printed.
        seconds: from the fault until no rank was left, but those of a host that is lost; None: some
            had to be killed.
        over: the same of all processes, the launcher's too.
        left: what had to be killed: then, or some time after a lost host was there again.
    """

    met: bool
    status: int
    said: str
    seconds: float | None
    over: float | None
    left: tuple[str, ...]


def run(
    fault: str,
    moment: str,
    start: str,
    folder: Path,
    limit: float,
    lab: Lab | None = None,
    launcher_ends: bool = True,
) -> Outcome:
    """Run fault.py; after `limit` seconds from the fault, kill what is left.

    Args:
        fault: what the last rank or its host meets.
        moment: when.
        start: how the ranks are started, see fault_starts.py.
        folder: an empty one for the files of this job.
        limit: in seconds.
        lab: the hosts, for a start on hosts.
        launcher_ends: whether to wait for the launcher as well.
    """
    # By it the job's processes are known, in whatever session or host a launcher puts them.
    environment = {
        _MARK: str(folder),
        "MPIDDP_STALL_SECONDS": "2",
        "MPIDDP_START_SECONDS": str(_START_LIMIT),
    }
    with open(folder / "said", "w+b") as said:
        launcher = launch(start, [fault, moment, str(folder)], environment, said, lab)
        job = _Job(fault, folder, launcher, lab)
        try:
            seconds, over = job.watch(limit, launcher_ends)
            if seconds is not None:
                job.let_host_come_back()
            left = job.describe()
        finally:
            job.kill()
            status = launcher.wait()
    text = (folder / "said").read_text(errors="replace")
    return Outcome(job.began() is not None, status, text, seconds, over, left)


@dataclass(frozen=True)
class _Job:
    fault: str
    folder: Path
    launcher: subprocess.Popen[bytes]
    lab: Lab | None

    def watch(self, limit: float, launcher_ends: bool) -> tuple[float | None, float | None]:
        """Return the seconds from the fault until no rank, and until no process was left.

        None: too late.
        """
        started = time.monotonic()
        began = ranks_ended = None
        while True:
            time.sleep(_NAP)
            began = began or self.began()
            if (
                began is not None
                and ranks_ended is None
                and not self._processes(without_lost=True, ranks=True)
            ):
                ranks_ended = time.monotonic() - began
                if not launcher_ends:
                    return ranks_ended, None
            # Looking through all processes takes a while.
            if self.launcher.poll() is not None and not self._processes(without_lost=True):
                break
            if (self.folder / "kill-launcher").exists():
                (self.folder / "kill-launcher").unlink()
                self._kill_launcher()
            if (self.folder / "host-fault").exists():
                (self.folder / "host-fault").unlink()
                assert self.lab is not None
                self.lab.command(*HOST_FAULTS[self.fault][0])
                (self.folder / "host-fault-met").touch()
            deadline = started + patience.enough(_START) if began is None else began + limit
            if time.monotonic() > deadline:
                return ranks_ended, None
        over = time.monotonic() - (began or started)
        return over if ranks_ended is None else ranks_ended, over

    def let_host_come_back(self) -> None:
        """Undo the fault of a host, and wait for the end of its processes."""
        if self.fault not in HOST_FAULTS or not HOST_FAULTS[self.fault][1]:
            return
        assert self.lab is not None
        self.lab.command(*HOST_FAULTS[self.fault][1])
        # What entered the host from outside was stopped with it.
        self._signal(signal.SIGCONT)
        deadline = time.monotonic() + _AFTERWARDS
        while self._processes() and time.monotonic() < deadline:
            time.sleep(_NAP)

    def describe(self) -> tuple[str, ...]:
        """Return the command lines of the processes that are left."""
        found = []
        for process in self._processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                where = ""
                if self.lab is not None:
                    where = next((f" on {n}" for n in NODES if self.lab.runs(process, n)), "")
                found.append(b" ".join(words[:2]).decode(errors="replace") + where)
        return tuple(found)

    def kill(self) -> None:
        """Kill all processes of the job that are left."""
        self._signal(signal.SIGKILL)

    def began(self) -> float | None:
        """Return when the fault was met, on the monotonic clock; None: not yet."""
        try:
            return float((self.folder / "began").read_text())
        except (OSError, ValueError):
            return None

    def _processes(self, without_lost: bool = False, ranks: bool = False) -> list[int]:
        """Return the processes of the job that still run.

        Args:
            without_lost: leave out those of a lost host.
            ranks: leave out the launcher's.
        """
        found = []
        mark = f"{_MARK}={self.folder}".encode()
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                # Empty, of one that has ended and is not waited for.
                if mark in environment.read_bytes().split(b"\0"):
                    command = (environment.parent / "cmdline").read_bytes()
                    # python [-u] fault.py; a launcher's has more before that.
                    if not ranks or _SCRIPT in b" ".join(command.split(b"\0")[1:3]):
                        found.append(int(environment.parent.name))
        if without_lost and self.lab is not None and self.fault in HOST_FAULTS:
            found = [each for each in found if not self.lab.runs(each, _NODE)]
        return found

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def _kill_launcher(self) -> None:
        """Kill what the user started, which on a host is below what enters it."""
        process = self.launcher.pid
        with contextlib.suppress(OSError, IndexError, ProcessLookupError):
            if self.lab is not None:
                below = Path(f"/proc/{process}/task/{process}/children").read_text()
                process = int(below.split()[0])
            os.kill(process, signal.SIGKILL)

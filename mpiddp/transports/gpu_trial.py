"""Try in other processes whether MPI can be given pointers into GPU memory.

An MPI that cannot do what it promises does not return an error: it crashes, hangs or adds
garbage. So a small job is started beside this one, from one rank, and judged by its output.
`gpu_trial_rank` is what it runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mpiddp import settings

__all__ = ["trial"]

# Enough to import torch and make a context on the GPU twice, from a slow file system.
SECONDS = settings.TRIAL_SECONDS.unset
RANKS = 2

# What a rank prints: the first two followed by the number of ranks, the last by the error.
STARTED = "mpiddp trial: a rank of"
PASSED = "mpiddp trial: right sums on a rank of"
FAILED = "mpiddp trial: failed: "

# What launchers tell a rank about its job. A rank of another job must not see these, but it must
# see users' settings (OMPI_MCA_, PRTE_MCA_, MPICH_, MPIR_).
_OF_A_JOB = (
    "PMI_", "PMIX_", "PRTE_", "OMPI_", "HYDI_", "HYDRA_", "MPI_LOCAL", "PALS_", "ALPS_", "SLURM_",
    "FLUX_", "MPIEXEC_",
)  # fmt: skip
_OF_A_USER = ("PMIX_MCA_", "PRTE_MCA_", "OMPI_MCA_")
# Set by mpirun itself.
_NOT_OF_A_USER = ("OMPI_MCA_num_procs", "OMPI_MCA_initial_wdir")

# What a rank runs. The program may have found the package in a folder that a new Python does not
# know; that comes last, so that it hides nothing.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from mpiddp.transports.gpu_trial_rank import main; sys.exit(main(sys.argv[1:]))"
)

# The job shares cores and GPU with this one.
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",
    "OMP_NUM_THREADS": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "HYDRA_LAUNCHER": "fork",
}


def trial(
    way: str,
    device: torch.device,
    *,
    runtime: tuple[str, str] | None = None,
    seconds: float = SECONDS,
    program: Sequence[str] | None = None,
    launchers: Sequence[str] | None = None,
) -> tuple[int, str]:
    """Average gradients on a GPU in a separate job; return on how many ranks, or what failed.

    Not collective, and nothing that happens to that job affects this one.

    Args:
        way: "device" or "ring".
        device: the GPU to use.
        runtime: path and prefix of a runtime that stands in for GPUs of this type.
        seconds: after which the job is ended.
        program: what to run as its ranks, for tests.
        launchers: programs that start a job; None means those that belong to this MPI.

    Returns:
        The ranks of the job and "", or 0 and why it failed. It has one rank if no launcher
        can start two from here: then no sum was computed.
    """
    if program is None:
        folder = str(Path(__file__).parents[2])
        arguments = [folder, way, f"{device.type}:{device.index or 0}", *(runtime or ())]
        program = [sys.executable, "-c", _PROGRAM, *arguments]
    problem = "nothing started it"
    for launcher in [*(find_launchers() if launchers is None else launchers), None]:
        command = [launcher, "-n", str(RANKS)] if launcher else []
        ranks = RANKS if launcher else 1
        started, problem = _run([*command, *program], ranks, seconds)
        if not problem:
            return ranks, ""
        if started:
            break
    return 0, problem


def find_launchers() -> list[str]:
    """Return the paths of the mpirun or mpiexec of this MPI, likeliest first. Not collective."""
    from mpiddp.mpi.running_library import mapped_libraries

    folders = [str(Path(path).parents[1] / "bin") for path in mapped_libraries("libmpi")]
    folders += [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    found = []
    for folder in folders:
        for name in ("mpirun", "mpiexec"):
            path = shutil.which(name, path=folder)
            if path is not None and path not in found:
                found.append(path)
                break
    return found


def environment_of_a_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a job that is independent of this one. Not collective."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _NOT_OF_A_USER
        and (name.startswith(_OF_A_USER) or not name.startswith(_OF_A_JOB))
    }
    if os.geteuid() == 0:  # as this job was
        kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | _ENVIRONMENT


def _run(command: Sequence[str], ranks: int, seconds: float) -> tuple[bool, str]:
    """Run a job; return whether it began, and what is wrong with it."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            process = subprocess.Popen(
                command,
                # Python before 3.11 imports from there: not where a source folder hides the
                # package, nor where other users may put files.
                cwd="/",
                env=environment_of_a_job(os.environ)
                | {settings.TRIAL_SECONDS.name: f"{seconds:g}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return False, f"{command[0]} cannot be started: {error}"
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
        output.seek(0)
        lines = output.read().splitlines()
    began = sum(line.startswith(f"{STARTED} {ranks}") for line in lines) > 0
    passed = sum(line.startswith(f"{PASSED} {ranks}") for line in lines)
    if late:
        return began, f"it had not ended after {seconds:g} s"
    if process.returncode == 0 and passed == ranks:
        return True, ""
    said = [line.removeprefix(FAILED) for line in lines if line.startswith(FAILED)]
    said += [line for line in reversed(lines) if re.search(r"\w", line)][:1]
    last = f": {said[0].strip()[:200]}" if said and not said[0].startswith(STARTED) else ""
    return began, f"it ended with {_describe_status(process.returncode)}{last}"


def _describe_status(status: int) -> str:
    if status < 0:
        return f"signal {-status} ({signal.strsignal(-status)})"
    return f"exit status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of the session that a process leads."""
    deadline = time.monotonic() + 10
    while (left := _session(process.pid)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.02)
    process.wait()


def _session(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state ppid pgrp session ...; the name may hold any bytes
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            state, _, _, session = fields[:4]
            if int(session) == leader and state not in "ZX":
                found.append(int(entry.parent.name))
    return found

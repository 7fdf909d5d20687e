"""Start Python programs under mpirun from a test, and end all their processes in time."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import patience

__all__ = ["find", "run", "run_command", "run_torchrun", "started"]

# What the Makefile sets too. All ranks share this machine's cores: they must not be bound, and must
# yield when they wait.
ENVIRONMENT = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_osc": "^ucx",
    # It sleeps for a second in each MPI_Init. The tests between hosts go without, and
    # rendezvous/test_init_by_name.py.
    "OMPI_MCA_btl": "^ofi",
    "OMP_NUM_THREADS": "1",
}
if os.geteuid() == 0:
    ENVIRONMENT |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def find() -> str:
    """Return the mpirun that belongs to the running Python: beside it, else the one on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise FileNotFoundError(f"no mpirun beside {sys.executable} and none on PATH")
    return found


def run(
    n: int,
    args: Sequence[str | os.PathLike[str]],
    timeout: float,
    env: Mapping[str, str | None] | None = None,
    before: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS` on `n` ranks and return what it printed, whatever its exit code.

    `env` is added to the environment; a value of None removes the variable. `before` is a command
    that starts mpirun. After `timeout` seconds, more on a busy machine, every process of the run is
    killed, and TimeoutError raised with the end of its output.
    """
    arguments = (os.fspath(arg) for arg in args)
    return run_command([*before, find(), "-n", str(n), sys.executable, *arguments], timeout, env)


def run_torchrun(
    n: int,
    args: Sequence[str | os.PathLike[str]],
    timeout: float,
    env: Mapping[str, str | None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script on `n` ranks of torchrun, without MPI; else as `run`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Ranks find each other by the host's name, which need not be known.
    env = {"GLOO_SOCKET_IFNAME": "lo", **(env or {})}
    options = ["--nproc-per-node", str(n), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    arguments = (os.fspath(arg) for arg in args)
    command = [sys.executable, "-m", "torch.distributed.run", *options, *arguments]
    return run_command(command, timeout, env)


def run_command(
    command: Sequence[str], timeout: float, env: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that starts ranks; else as `run`."""
    # Files, not pipes: a rank that outlived its mpirun would keep a pipe open.
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as err,
    ):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=_environment(env),
            start_new_session=True,
        )
        try:
            process.wait(patience.enough(timeout))
        except subprocess.TimeoutExpired:
            late = True
        else:
            late = False
        finally:
            _end(process)
        out.seek(0)
        err.seek(0)
        result = subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())
    if late:
        raise TimeoutError(
            f"{' '.join(command)}: not done after {timeout} s\n"
            f"stdout: {result.stdout[-2000:]}\nstderr: {result.stderr[-2000:]}"
        )
    return result


@contextlib.contextmanager
def started(
    n: int, args: Sequence[str | os.PathLike[str]], env: Mapping[str, str | None] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `python ARGS` on `n` ranks beside the test, and kill all that is left of it at the end.

    What it prints goes where the test's own output goes.
    """
    arguments = (os.fspath(arg) for arg in args)
    process = subprocess.Popen(
        [find(), "-n", str(n), sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        env=_environment(env),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def _environment(env: Mapping[str, str | None] | None) -> dict[str, str]:
    """Return this process's environment, with what is needed here and what was given."""
    # Unbuffered, print writes a line and its end apart, and the ranks' lines mix.
    inherited = {**os.environ, "PYTHONUNBUFFERED": None}
    merged: dict[str, str | None] = {**ENVIRONMENT, **inherited, **(env or {})}
    return {name: value for name, value in merged.items() if value is not None}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End `process` and all that it started: first mpirun in its own way, then by force."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    if process.poll() is None:
        process.kill()
    # Launchers put ranks into process groups of their own, but all remain in mpirun's session.
    deadline = time.monotonic() + 10
    while (left := _session(process.pid)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.05)
    process.wait()


def _session(leader: int) -> list[int]:
    """Return the pids of the processes of a session that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state ppid pgrp session ...; the name may hold any bytes
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            state, _, _, session = fields[:4]
            if int(session) == leader and state not in "ZX":
                found.append(int(entry.parent.name))
    return found

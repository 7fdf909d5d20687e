"""The console command `mpiddp`: run a script on MPI, ask the doctor, read records, start mpirun.

It lies beside the package, not in it: importing the package loads torch, which takes seconds, and
raises where the MPI does not fit. So --help and --version are quick, and what an import refuses is
said in a sentence. Unlike `python -m`, a console command does not put the working folder on the
path. Nothing here initialises MPI.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.util import find_spec, module_from_spec
from types import FrameType

_HELP = """\
usage: mpiddp run [options] (SCRIPT | -m MODULE | -c CODE) [argument ...]
       mpiddp doctor [--json] [--quick]
       mpiddp top [options] [PATTERN]
       mpiddp flight-recorder [options] FOLDER
       mpiddp report [--html FILE] [--json] FOLDER
       mpiddp launch mpirun [options] COMMAND [argument ...]
       mpiddp --version | --help

run              run a script written for torchrun on MPI, as it is: mpirun -n 4 mpiddp run train.py
doctor           say what mpiddp finds on this machine, and what is wrong: mpirun -n 4 mpiddp doctor
top              show what the ranks on this node do now, as top does of processes
flight-recorder  say in words what the ranks of a job did last
report           say where the time of the steps in a trace went, and what to change
launch           start Open MPI's mpirun, and end with 1 if it has lost a host, where it ends with 0

mpiddp COMMAND --help says more."""

# As in mpiddp/launchers.py, which only importing the package would give.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


def main() -> int:
    """Do what the command line says; return the exit status. Collective for run and doctor."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        return _say(_HELP)
    if name == "--version":
        return _say(f"mpiddp {metadata.version('mpiddp')}")
    if name == "launch":
        return _launch(arguments)
    if name not in _COMMANDS:
        return _complain(f"there is no command {name!r}: {', '.join(_COMMANDS)} or launch", 2)
    try:
        command = _COMMANDS[name]()
    except ImportError as error:
        status = refused(error, name == "doctor" and "--json" in arguments)
        if status is None:
            raise
        return status
    return command(arguments, f"mpiddp {name}")


def refused(error: ImportError, as_json: bool) -> int | None:
    """Say in a sentence what importing mpiddp refuses; return the exit status. Not collective.

    Nothing is said, and None returned, of any other error: it is a fault.

    Args:
        error: what the import has raised.
        as_json: say it as the doctor's report with --json.
    """
    # What mpiddp refuses begins with the name of what it is about.
    if not str(error).startswith(("mpiddp ", "mpi4py ", "two MPI libraries ")):
        return None
    if not as_json:
        return _complain(str(error), 1)
    text, _, remedy = str(error).partition(". ")
    finding = {"grade": "error", "text": text, "remedy": remedy}
    _say(json.dumps({"grade": "error", "findings": [finding]}, indent=1))
    return 1


def _run() -> Callable[[Sequence[str], str], int]:
    from mpiddp.runner import command

    return command.main


def _doctor() -> Callable[[Sequence[str], str], int]:
    from mpiddp import doctor

    return doctor.main


def _flight_recorder() -> Callable[[Sequence[str], str], int]:
    from mpiddp.flight_recorder import __main__ as flight_recorder

    return flight_recorder.main


def _top() -> Callable[[Sequence[str], str], int]:
    # The package without what its import loads: torch, and an MPI.
    spec = find_spec("mpiddp")
    assert spec is not None
    sys.modules["mpiddp"] = module_from_spec(spec)
    from mpiddp.top import __main__ as top

    return top.main


def _report() -> Callable[[Sequence[str], str], int]:
    from mpiddp.report import __main__ as report

    return report.main


_COMMANDS = {
    "run": _run,
    "doctor": _doctor,
    "top": _top,
    "flight-recorder": _flight_recorder,
    "report": _report,
}


# The pages that Open MPI's launcher prints when it has lost its daemon on a host, and the host.
_LOST = re.compile(
    rb"(?:lost communication with a remote daemon.*?Remote daemon: \S+ on node"
    rb"|daemon failed to report back.*?Remote host:)\s+(\S+)",
    re.DOTALL,
)
_LONGEST_PAGE = 4096
# Handed on to the launcher. Ctrl-C reaches it by itself.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def _launch(command: Sequence[str]) -> int:
    """Run a launcher, copy what it prints, and return a status that is not 0 if it failed.

    Open MPI's ends with 0 when a host is lost, whatever its ranks do: it neither prints what they
    say nor asks for their statuses any more. Only its own page tells.
    """
    if not command or command[0].startswith("-"):
        return _complain("launch needs a command: mpiddp launch mpirun -n 4 python train.py", 2)
    early: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        elif child.poll() is None:
            child.send_signal(number)

    for number in _SIGNALS:
        signal.signal(number, hand_on)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        return _complain(f"{command[0]} cannot be started: {error.strerror}", 127)
    for came in early:
        child.send_signal(came)
    lost = _copy_output(child)
    status = child.wait()
    if status < 0:
        status = 128 - status
    if lost:
        return _complain(
            f"{os.path.basename(command[0])} has lost the host {lost}: it is off, or its daemon "
            f"there has ended. So it has ended the ranks of all other hosts, with status {status}"
            f"{', which mpiddp launch makes 1' if status == 0 else ''}",
            status or 1,
        )
    return status


def _copy_output(child: subprocess.Popen[bytes]) -> str:
    """Copy what a process prints until it ends; return the host that it has lost, or "".

    One of the pages comes on stdout, the other one on stderr.
    """
    assert child.stdout is not None
    assert child.stderr is not None
    streams = {child.stdout.fileno(): 1, child.stderr.fileno(): 2}
    recent, host, ended = {1: b"", 2: b""}, "", 0.0
    # Not until the pipes are closed: the launcher's helpers, such as ssh, may live on with them.
    while not ended or time.monotonic() - ended < 0.5:
        ready = select.select(list(streams), [], [], 0.1)[0]
        for descriptor in ready:
            stream, said = streams[descriptor], os.read(descriptor, 65536)
            if not said:
                del streams[descriptor]
            _write(stream, said)
            recent[stream] = recent[stream][-_LONGEST_PAGE:] + said
            found = _LOST.search(recent[stream])
            host = found[1].decode(errors="replace") if found else host
        if not ended and child.poll() is not None:
            ended = time.monotonic()
        if ended and not streams:
            break
    return host


def _write(descriptor: int, said: bytes) -> None:
    """Write all of it, if there is still somebody to take it."""
    try:
        while said:
            said = said[os.write(descriptor, said) :]
    except OSError:
        pass  # nobody reads it, and the launcher goes on


def _say(text: str) -> int:
    if _first():
        print(text, flush=True)
    return 0


def _complain(text: str, status: int) -> int:
    if _first():
        print(f"mpiddp: {text}", file=sys.stderr, flush=True)
    return status


def _first() -> bool:
    """Whether this process is the one of a job to say what all would say."""
    return next((os.environ[name] for name in _RANKS if name in os.environ), "0") == "0"

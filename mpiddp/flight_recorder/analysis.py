"""Say in words what the flight recorders of all ranks tell: who waits, for what, and for whom.

A rank that hangs is late in some group: the others wait there for an operation that it has not
begun. So for each group the first operation that is not complete is looked at on all ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddp.flight_recorder.call_text import is_of_a_library, ranks_in_words

__all__ = ["Dump", "explain", "read"]

# How many frames of the user's are shown.
_FRAMES = 3


class _Plain(pickle.Unpickler):
    """Reads what torch's format has, numbers, texts, lists and dictionaries: runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not in a flight recorder's file")


@dataclass(frozen=True)
class Dump:
    """What one rank has written."""

    rank: int
    content: dict[str, Any]

    def entries(self, group: str) -> dict[int, dict[str, Any]]:
        """Return the operations of a group by number."""
        return {
            entry["collective_seq_id"]: entry
            for entry in self.content["entries"]
            if entry["process_group"][0] == group
        }


def read(folder: Path, prefix: str | None = None) -> list[Dump]:
    """Return the dumps in a folder, by rank. Not collective.

    Args:
        folder: the files of all ranks, whose names end with the rank.
        prefix: what their names begin with; None: whatever comes before the rank.

    Raises:
        OSError: the folder cannot be read.
        ValueError: it holds no dump, or those of several jobs.
    """
    found: dict[str, list[Dump]] = {}
    for path in sorted(folder.iterdir()):
        name = path.name
        start = name.rstrip("0123456789")
        if name == start or name.startswith(".") or prefix not in (None, start):
            continue
        with path.open("rb") as file:
            try:
                content = _Plain(file).load()
            except Exception:  # noqa: S112  # of whatever bytes these are
                continue
        if isinstance(content, dict) and {"entries", "pg_config", "version"} <= content.keys():
            found.setdefault(start, []).append(Dump(int(name[len(start) :]), content))
    if not found:
        raise ValueError(f"{folder} holds no file of a flight recorder")
    if len(found) > 1:
        raise ValueError(
            f"{folder} holds files of several jobs: choose one with --prefix, of "
            f"{', '.join(sorted(found))}"
        )
    return sorted(next(iter(found.values())), key=lambda dump: dump.rank)


def explain(dumps: list[Dump]) -> list[str]:
    """Return lines that say what the ranks wait for. Not collective."""
    lines = [f"Files of {_ranks(dump.rank for dump in dumps)}."]
    for name, ranks in _groups(dumps).items():
        missing = sorted(set(ranks) - {dump.rank for dump in dumps})
        waits = list(_explain_group(name, ranks, dumps))
        if waits and missing:
            who = _ranks(missing).capitalize()
            waits.append(f"  {who} left no file: ended, or could not write one")
        lines += waits
    if len(lines) == 1:
        lines.append("No operation was under way, and all ranks had called the same ones.")
    return lines


def _groups(dumps: list[Dump]) -> dict[str, list[int]]:
    """Return the world ranks of each group that some rank knows."""
    groups: dict[str, list[int]] = {}
    for dump in dumps:
        for name, config in dump.content["pg_config"].items():
            groups.setdefault(name, [int(rank) for rank in config["ranks"].strip("[]").split(",")])
    return groups


def _explain_group(name: str, ranks: list[int], dumps: list[Dump]) -> Iterator[str]:
    entries = {dump.rank: dump.entries(name) for dump in dumps if dump.rank in ranks}
    if not any(entries.values()):
        return
    number = _first_to_look_at(entries)
    if number is None:
        return
    # A rank whose oldest record is a later one has begun and ended it long ago.
    here = {rank: mine[number] for rank, mine in entries.items() if number in mine}
    absent = [rank for rank, mine in entries.items() if max(mine, default=0) < number]
    for words, callers in _by_words(here).items():
        unfinished = [rank for rank in callers if here[rank]["state"] != "completed"]
        doing = f"{_ranks(unfinished)} in it" if unfinished else "complete there"
        yield f"Group {name!r}, operation {number}: {words} on {_ranks(callers)}, {doing}"
        yield from _where(here[(unfinished or callers)[0]])
    if len(_by_words(here)) > 1:
        yield "  The ranks have called different operations: this is the fault to look for."
    for rank in absent:
        last = max(entries[rank], default=None)
        where = "none in this group" if last is None else f"{last}, {entries[rank][last]['words']}"
        yield f"  Rank {rank} has not begun it. Its last: {where}"
        dump = next(dump for dump in dumps if dump.rank == rank)
        yield from _instead(dump, name)
    if not absent and len(_by_words(here)) == 1 and len(here) == len(ranks):
        yield "  All ranks have begun it: the connection is slow or has failed, or a rank is slow."


def _first_to_look_at(entries: dict[int, dict[int, dict[str, Any]]]) -> int | None:
    """Return the first operation that some rank has not completed, or called by another name."""
    numbers = sorted({number for mine in entries.values() for number in mine})
    for number in numbers:
        here = [mine[number] for mine in entries.values() if number in mine]
        if any(entry["state"] != "completed" for entry in here):
            return number
        if not here[0]["is_p2p"] and len({entry["words"] for entry in here}) > 1:
            return number
    return None


def _by_words(here: dict[int, dict[str, Any]]) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {}
    for rank, entry in here.items():
        # Both ends of a message are one operation.
        words = "a message" if entry["is_p2p"] else entry["words"]
        said.setdefault(words, []).append(rank)
    return said


def _instead(dump: Dump, group: str) -> Iterator[str]:
    """Say what a late rank did last in other groups."""
    others = [e for e in dump.content["entries"] if e["process_group"][0] != group]
    if others:
        last = max(others, key=lambda entry: int(entry["time_created_ns"]))
        state = "done" if last["state"] == "completed" else "not done"
        where = last["process_group"][0]
        yield f"  Elsewhere it came to {last['words']} of group {where!r}, {state}"
        yield from _where(last)


def _where(entry: dict[str, Any]) -> Iterator[str]:
    shown = 0
    for frame in entry["frames"]:
        if shown < _FRAMES and not is_of_a_library(frame["filename"]):
            shown += 1
            yield f"    {frame['filename']}:{frame['line']} in {frame['name']}"


def _ranks(ranks: Iterable[int]) -> str:
    members = sorted(ranks)
    return ranks_in_words(range(max(members, default=0) + 1), members) if members else "no rank"

"""Find this user's ranks on this node, and keep their pages open from one look to the next."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpiddp.system.rank_signs import PROC, process_ids, sign_of
from mpiddp.top.pages import Page, read
from mpiddp.top.processes import Usage, command_of, usage_of
from mpiddp.version import __version__

__all__ = ["Finder", "Rank"]

_PAGE = "/memfd:mpiddp-last-done (deleted)"
# Signs change when a program makes another world. Most processes never get one, and those that do
# get it soon: a node may have a thousand data loaders, with a hundred open files each.
_SECONDS_TO_NEXT_SIGN = 5.0
_SECONDS_TO_FIRST_SIGN = 20.0
_YOUNG = 120.0


@dataclass(frozen=True)
class Rank:
    """A rank as it was at one moment.

    Attributes:
        process_id: its number here.
        began: ticks since the machine started; with the number it names the process.
        rank: in its world.
        job: the name of its job.
        size: how many ranks that has.
        version: of mpiddp there.
        command: its command line.
        usage: of processor and memory.
        page: what it tells; None where it cannot be understood, or read.
        problem: why not, in words.
    """

    process_id: int
    began: int
    rank: int
    job: str
    size: int
    version: str
    command: str
    usage: Usage
    page: Page | None
    problem: str = ""


@dataclass
class _Process:
    """What is kept of a process."""

    sign: dict[str, Any] = field(default_factory=dict)
    page: mmap.mmap | None = None
    command: str = ""
    next_sign: float = 0.0

    def close(self) -> None:
        if self.page is not None:
            self.page.close()
        self.page = None


class Finder:
    """Looks again and again for ranks. Not collective.

    Args:
        pattern: a regular expression that is found in their command lines.

    Raises:
        re.error: it is none.
    """

    def __init__(self, pattern: str = "") -> None:
        self._wanted = re.compile(pattern)
        self._known: dict[tuple[int, int], _Process] = {}

    def look(self) -> list[Rank]:
        """Return the ranks that there are now, by job and rank. Not collective."""
        before, self._known = self._known, {}
        found = list(self._look(before))
        for key in before.keys() - self._known.keys():
            before[key].close()
        return sorted(found, key=lambda rank: (rank.job, rank.rank, rank.process_id))

    def close(self) -> None:
        """Let go of all pages. Not collective."""
        for process in self._known.values():
            process.close()
        self._known.clear()

    def _look(self, before: Mapping[tuple[int, int], _Process]) -> Iterator[Rank]:
        own = os.getuid()
        for process_id in process_ids():
            with contextlib.suppress(OSError):  # processes end while we look
                if os.stat(PROC / str(process_id)).st_uid != own:
                    continue
                usage = usage_of(process_id)
                if usage.state in "ZX":
                    continue
                key = process_id, usage.began
                process = self._known[key] = before.get(key) or _Process()
                if time.monotonic() >= process.next_sign:
                    self._read_sign(process_id, process, usage)
                rank = _rank_of(process_id, process, usage)
                if rank is not None:
                    yield rank

    def _read_sign(self, process_id: int, process: _Process, usage: Usage) -> None:
        process.close()
        process.sign = sign_of(process_id)
        world = process.sign.get("world")
        if process.sign:
            process.command = command_of(process_id)
            if not self._wanted.search(process.command):
                process.sign = {}
        wait = 0.0
        if process.sign:
            wait = _SECONDS_TO_NEXT_SIGN if world else 0.0
        elif usage.age > _YOUNG:
            wait = _SECONDS_TO_FIRST_SIGN
        process.next_sign = time.monotonic() + wait
        if isinstance(world, dict) and process.sign:
            process.page = _open_page(process_id, world.get("page", -1))


def _open_page(process_id: int, descriptor: Any) -> mmap.mmap | None:
    """Return what a rank shows, None if that is not this user's page of a rank."""
    path = f"{PROC}/{process_id}/fd/{descriptor}"
    opened = -1
    try:
        if os.readlink(path) != _PAGE:
            return None
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if os.fstat(opened).st_uid != os.getuid():
            return None
        return mmap.mmap(opened, 0, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        if opened >= 0:
            os.close(opened)


def _rank_of(process_id: int, process: _Process, usage: Usage) -> Rank | None:
    """Return what a process tells; None if it is no rank, or has left its world."""
    sign = process.sign
    if not sign:
        return None
    version, world = str(sign.get("version", "")), sign.get("world")
    if version and not isinstance(world, dict):
        return None  # it has not come to a world yet
    world = world or {}
    page, problem = None, ""
    if version != __version__:
        theirs = f"mpiddp {version}" if version else "an older mpiddp"
        problem = f"runs {theirs}, and this is {__version__}: ask with the Python of that job"
    elif process.page is None:
        problem = "shares no memory in which it could be seen"
    else:
        try:
            page = read(process.page, world.get("layout", {}))
        except ValueError as error:
            problem = f"runs another build of mpiddp {version}: {error}"
    if page is not None and page.left:
        process.next_sign = 0.0
        return None
    return Rank(
        process_id,
        usage.began,
        int(sign.get("rank", 0)),
        str(world.get("job", "")),
        int(world.get("size", 0)),
        version,
        process.command,
        usage,
        page,
        problem,
    )

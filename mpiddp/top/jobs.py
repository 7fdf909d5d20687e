"""What there is to show: the jobs of this node, and the numbers of their ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from mpiddp.top.finding import Finder, Rank
from mpiddp.top.now import Doing, awaited, doing
from mpiddp.top.pages import Module
from mpiddp.top.rates import History, main_module

__all__ = ["Job", "Row", "Watcher"]


@dataclass(frozen=True)
class Row:
    """The numbers of a rank. None: nobody knows.

    Attributes:
        rank: as it was found.
        module: whose steps these are, None without a wrapped module.
        steps: gradients were reduced so often.
        steps_per_second: now.
        exposed: the share of the time in which it has waited for gradients, that of their
            communication included.
        waiting: the share in which it has waited for the last rank.
        slowest: the rank that the others wait for most often, -1 for none.
        operations: that it has begun.
        operations_per_second: now.
        processor: which share of a core it uses.
        doing: what it does now.
        awaited: the ranks of this node that have not come to that.
    """

    rank: Rank
    module: Module | None
    steps: int | None
    steps_per_second: float | None
    exposed: float | None
    waiting: float | None
    slowest: int
    operations: int
    operations_per_second: float | None
    processor: float
    doing: Doing
    awaited: list[int]


@dataclass(frozen=True)
class Job:
    """The ranks of a job on this node.

    Attributes:
        name: as the flight recorder's files have it.
        size: how many ranks it has on all nodes.
        command: of its first rank here, without the interpreter.
        rows: by rank.
        still: for how many seconds nobody here has made a step, where they did before and make
            none now; else None.
        awaited: the ranks that others wait for now, while they wait in nothing themselves.
    """

    name: str
    size: int
    command: str
    rows: list[Row]
    still: float | None
    awaited: list[int]


class Watcher:
    """Looks at the ranks of this node, again and again. Not collective.

    Args:
        pattern: a regular expression that is found in their command lines.

    Raises:
        re.error: it is none.
    """

    def __init__(self, pattern: str = "") -> None:
        self._finder = Finder(pattern)
        self._histories: dict[tuple[int, int], History] = {}

    def look(self) -> list[Job]:
        """Return the jobs of now, by name. Not collective."""
        ranks = self._finder.look()
        now = time.monotonic()
        before, self._histories = self._histories, {}
        for rank in ranks:
            key = rank.process_id, rank.began
            history = self._histories[key] = before.get(key) or History()
            history.add(rank)
        by_job = groupby(ranks, key=lambda rank: rank.job)
        return [self._job(name, list(members), now) for name, members in by_job]

    def close(self) -> None:
        """Let go of what is open. Not collective."""
        self._finder.close()

    def _job(self, name: str, ranks: Sequence[Rank], now: float) -> Job:
        rows = [self._row(rank, ranks, now) for rank in ranks]
        ends = [row.module.steps.last for row in rows if row.module is not None]
        stands = bool(ends) and all(
            row.steps_per_second == 0 for row in rows if row.module is not None
        )
        # Who waits for another one is not the cause.
        waiting = {row.rank.rank for row in rows if row.awaited}
        wanted = {rank for row in rows for rank in row.awaited}
        return Job(
            name,
            ranks[0].size,
            program_of(ranks[0].command),
            rows,
            now - max(ends) if stands else None,
            sorted(wanted - waiting or wanted),
        )

    def _row(self, rank: Rank, others: Sequence[Rank], now: float) -> Row:
        history = self._histories[rank.process_id, rank.began]
        module = main_module(rank)
        compared = module is not None and module.compared > 0
        operations = 0 if rank.page is None else rank.page.operations.count
        return Row(
            rank,
            module,
            None if module is None else module.steps.count,
            None if module is None else history.steps.per_second(now),
            None if module is None else history.steps.share(),
            module.waited / module.mean_step if module is not None and _known(module) else None,
            module.slowest if module is not None and compared else -1,
            operations,
            history.operations.per_second(now) if operations else None,
            history.processor,
            doing(rank, now),
            awaited(rank, others, now),
        )


def _known(module: Module) -> bool:
    return module.compared > 0 and module.mean_step > 0


def program_of(command: str) -> str:
    """Return a command line without the folders before Python and the program. Not collective."""
    words = command.split(" ")
    if len(words) > 1 and os.path.basename(words[0]).startswith("python"):
        words = words[1:]
    words[0] = os.path.basename(words[0]) or words[0]
    return " ".join(words)

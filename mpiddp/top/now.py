"""What a rank does at this moment, and for which ranks of this node it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpiddp.top.finding import Rank
from mpiddp.top.pages import Act

__all__ = ["Doing", "awaited", "doing"]

# Seconds after which somebody who waits is worth a name.
_LONG = 1.0

_STATES = {
    "T": "is stopped (SIGSTOP, scontrol suspend)",
    "t": "is stopped by a debugger",
    "D": "is in a call of the system that cannot be interrupted",
}


@dataclass(frozen=True)
class Doing:
    """What a rank does.

    Attributes:
        words: in words.
        since: for so many seconds; None if nobody knows.
        act: the operation or bucket that is under way, None if there is none.
    """

    words: str
    since: float | None
    act: Act | None = None


def doing(rank: Rank, now: float) -> Doing:
    """Return what a rank does. Not collective.

    Args:
        rank: as it was found.
        now: seconds on the monotonic clock.
    """
    page = rank.page
    if page is None:
        return Doing(rank.problem, None)
    acts = [act for act in (page.operation, page.bucket) if act is not None]
    under_way = min(
        (act for act in acts if act.ended == 0), key=lambda act: act.began, default=None
    )
    moments = [act.began if act.ended <= 0 else act.ended for act in acts]
    moments += [module.steps.last for module in page.modules]
    since = max(now - max(moments), 0.0) if moments else None
    if under_way is not None:
        since = max(now - under_way.began, 0.0)
    stopped = _STATES.get(rank.usage.state)
    if stopped is not None:
        return Doing(stopped, since, under_way)
    if under_way is not None:
        return Doing(_with_group(under_way), since, under_way)
    if not acts:
        return Doing("has begun no operation", None)
    given_up = acts[-1].ended < 0
    return Doing("has given up an operation" if given_up else "in no operation", since)


def _with_group(act: Act) -> str:
    """Return its words, and the group where it is not that of all ranks."""
    plain = act.source in ("", "0", "default_pg") or act.source == act.words
    return act.words if plain or act.source in act.words else f"{act.words} in {act.source}"


def awaited(rank: Rank, others: Sequence[Rank], now: float) -> list[int]:
    """Return which ranks of this node have not come to what a rank waits in. Not collective.

    Args:
        rank: that waits.
        others: the ranks of its job on this node.
        now: seconds on the monotonic clock.
    """
    page = rank.page
    act = doing(rank, now).act
    if page is None or act is None or now - act.began < _LONG:
        return []
    return [other.rank for other in others if other is not rank and _is_behind(other, rank, act)]


def _is_behind(other: Rank, waiting: Rank, act: Act) -> bool:
    if other.page is None or waiting.page is None or not act.source:
        return False
    theirs = other.page.bucket if act is waiting.page.bucket else other.page.operation
    if theirs is not None and theirs.source == act.source:
        return theirs.number < act.number
    # It is in that group, and did something else last.
    return act.source in other.page.sources

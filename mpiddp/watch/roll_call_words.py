"""Say in words what the ranks of a group have answered to a question, see roll_call.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp.flight_recorder.call_text import describe, ranks_in_words
from mpiddp.flight_recorder.sources import BUCKETS
from mpiddp.watch import node_states

if TYPE_CHECKING:
    from mpiddp.watch.interface import CountedGroup
    from mpiddp.watch.wrapped_modules import WrappedModule

__all__ = [
    "ELSEWHERE",
    "UNKNOWN_GROUP",
    "Answer",
    "differences",
    "doing",
    "in_words",
    "listed",
    "sentence",
    "silent",
    "steps_made",
    "where_it_is",
    "who",
]

# Sent instead of a number of collectives.
UNKNOWN_GROUP = -1

# What a rank says if it waits for a bucket of another module.
ELSEWHERE = "it waits for "

# How many differences are shown before "and others".
_SHOWN = 4

# Collectives whose tensors may differ in size between ranks.
_OF_ANY_SIZES = ("all_gather", "all_to_all", "gather", "reduce_scatter", "scatter")


@dataclass(frozen=True)
class Answer:
    """What a rank says of a group.

    Attributes:
        entered: how many of its collectives it has called, or buckets filled.
        last: the last of them in words, or what it does instead of filling a bucket.
        where: where its program is.
        call: the collective that was asked about, in words; "" if it does not know.
        step: how many steps it has made, in words.
        waits: whether the collective that was asked about is under way there.
    """

    entered: int
    last: str
    where: str = ""
    call: str = ""
    step: str = ""
    waits: bool = False


def in_words(world_ranks: Sequence[int], answers: dict[int, Answer], number: int, own: int) -> str:
    """Return which ranks keep a collective waiting, in a sentence. Not collective.

    Args:
        world_ranks: the world rank of each of the group's ranks.
        answers: by rank in the group.
        number: which of its collectives.
        own: this rank.
    """
    told: list[str] = []
    missing = [rank for rank, answer in answers.items() if answer.entered < number]
    if missing:
        places: dict[str, list[int]] = {}
        for rank in missing:
            places.setdefault(where_it_is(answers[rank]), []).append(rank)
        details = list(places)
        if len(places) > 1:
            details = [
                f"{ranks_in_words(world_ranks, ranks)} {place}" for place, ranks in places.items()
            ]
        told.append(f"{who(world_ranks, missing, 'has', 'have')} not called it ({listed(details)})")
    told += silent(world_ranks, answers)
    told += differences(world_ranks, answers, number, own)
    if not told:
        return (
            "All ranks have called it: one may have given up waiting before, or it or the "
            "connection has failed"
        )
    return sentence(told)


def differences(
    world_ranks: Sequence[int],
    answers: dict[int, Answer],
    number: int,
    own: int,
    *,
    sizes: bool = False,
    places: bool = False,
) -> list[str]:
    """Return what other ranks have called instead, as one string or none. Not collective.

    Args:
        world_ranks: as for `in_words`.
        answers: as there.
        number: as there.
        own: as there.
        sizes: whether shapes are compared where they may differ, too.
        places: whether to say where the other ranks are now.
    """
    here = answers[own].call
    others: dict[str, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        if answer.entered < number or not answer.call or not here:
            continue
        if _compared(answer.call, sizes) != _compared(here, sizes):
            place = f" ({answer.where})" if places and answer.where else ""
            others.setdefault(f"{answer.call}{place}", []).append(rank)
    if not others:
        return []
    calls = [
        f"{ranks_in_words(world_ranks, ranks)} called {call}" for call, ranks in others.items()
    ]
    return [f"{listed(calls)} where {ranks_in_words(world_ranks, [own])} called {here}"]


def _compared(call: str, sizes: bool) -> str:
    name = call.partition(" ")[0].partition("(")[0]
    return call if sizes or name not in _OF_ANY_SIZES else call.partition(" (")[0]


def who(world_ranks: Sequence[int], ranks: Sequence[int], one: str, several: str) -> str:
    """Return words such as "ranks 1 and 2 have". Not collective."""
    return f"{ranks_in_words(world_ranks, ranks)} {one if len(ranks) == 1 else several}"


def silent(world_ranks: Sequence[int], answers: dict[int, Answer]) -> list[str]:
    """Return which ranks have not answered, as one string or none. Not collective."""
    ranks = [rank for rank in range(len(world_ranks)) if rank not in answers]
    return node_states.describe_silent(world_ranks, ranks)


def sentence(told: Sequence[str]) -> str:
    """Return parts of a sentence as one. Not collective."""
    text = "; ".join(told)
    return text[:1].upper() + text[1:]


def where_it_is(answer: Answer) -> str:
    """Return how far a rank has come with the collectives of the group. Not collective."""
    if answer.entered == UNKNOWN_GROUP:
        return "not in a group of this name and these ranks"
    if answer.entered == 0:
        return "no collective of this group so far"
    return f"last called: {answer.last}, #{answer.entered}"


def listed(parts: Sequence[str]) -> str:
    """Return the first few of several kinds, and how many more there are. Not collective."""
    more = len(parts) - _SHOWN
    return "; ".join(parts[:_SHOWN]) + (f"; and {more} other kinds" if more > 0 else "")


def steps_made(groups: Sequence[CountedGroup]) -> str:
    """Return how many steps a wrapped module has made, the first that there is. Not collective."""
    module = next((each for known in groups for each in known.modules.all()), None)
    if module is None:
        return ""
    return f"{module.buckets_filled() // BUCKETS} backward passes of {module.module_name} reduced"


def doing(module: WrappedModule, group: CountedGroup, groups: Sequence[CountedGroup]) -> str:
    """Return what this rank does instead of filling a bucket of `module`. Not collective."""
    progress = module.describe_progress()
    for other in (each for known in groups for each in known.modules.all()):
        if other is not module and (waits := other.describe_wait()):
            return f"{progress}; {ELSEWHERE}{waits}"
    if group.last is None:
        return progress
    return f"{progress}; last collective called: {describe(group.last)}, #{group.entered}"

"""Tell how far a reducer's buckets are, for ranks whose own bucket has timed out.

What Note [Roll call] in roll_call.py says of collectives holds for buckets too: a rank whose wait
has timed out asks, and a thread of each process answers, even while its program is in backward or
waits for another bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpiddp.flight_recorder.sources import BUCKETS

if TYPE_CHECKING:
    from mpiddp.reducer.bucket import Bucket
    from mpiddp.reducer.interface import DescribedReducer

__all__ = ["describe_progress", "describe_wait", "explain_missing", "filled"]

# How many parameters without a gradient are named.
_SHOWN = 3


def filled(reducer: DescribedReducer) -> int:
    """Return a number that grows with each bucket that is filled. Not collective."""
    launched = len(reducer.buckets) if reducer.shadowing else reducer.next_bucket
    return reducer.reductions * BUCKETS + launched


def explain_missing(reducer: DescribedReducer, bucket: Bucket) -> str:
    """Return which ranks keep a bucket waiting, and what they do now; may take seconds.

    Not collective.
    """
    group = reducer.process_group
    if group.roll_call is None:
        return ""
    wanted = reducer.reductions * BUCKETS + bucket.index + 1
    told: str = group.roll_call.explain_bucket(group, reducer.number, wanted)
    return f"{told}."


def describe_progress(reducer: DescribedReducer) -> str:
    """Return how far the backward passes are, in words. Not collective."""
    text = f"{reducer.reductions} of its backward passes are reduced"
    if reducer.expecting and reducer.ready:
        text += (
            f", in the next one {reducer.ready} of {len(reducer.parameters)} gradients are there"
        )
        left = reducer.without_gradient()
        if left:
            shown = ", ".join(reducer.describe_parameter(index) for index in left[:_SHOWN])
            more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
            text += f", but not of {shown}{more}"
        return text
    if reducer.passes is not None:
        return f"{text}, {reducer.passes.begun} forward passes begun"
    return text


def describe_wait(reducer: DescribedReducer) -> str:
    """Return which bucket is waited for just now, in words; "" if none is. Not collective."""
    waiting_for = reducer.waiting_for
    return "" if waiting_for < 0 else reducer.describe_bucket(reducer.buckets[waiting_for])

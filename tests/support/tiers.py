"""Tiers of tests, by marks: `essential` shows most of every room, `smoke` is a part of it.

As with `thorough`, keep=N in a mark on a function means so many of its parameter sets.
"""

import pytest

__all__ = ["evenly", "settle"]


def evenly(count: int, keep: int) -> set[int]:
    """Return `keep` of the first `count` numbers, evenly over all: neighbours are alike."""
    return {number * count // keep for number in range(keep)}


def settle(items: list[pytest.Item]) -> None:
    """Take the marks from parameter sets that are not kept; what is `smoke` is `essential` too."""
    for tier in ("essential", "smoke"):
        variants: dict[str, list[pytest.Item]] = {}
        keep: dict[str, int] = {}
        for item in items:
            mark = item.get_closest_marker(tier)
            if mark is not None and "keep" in mark.kwargs:
                function = item.nodeid.partition("[")[0]
                variants.setdefault(function, []).append(item)
                keep[function] = mark.kwargs["keep"]
        for function, tests in variants.items():
            kept = evenly(len(tests), keep[function])
            for index, item in enumerate(tests):
                if index not in kept:
                    item.own_markers[:] = [one for one in item.own_markers if one.name != tier]
    for item in items:
        if item.get_closest_marker("smoke") and not item.get_closest_marker("essential"):
            item.add_marker("essential")

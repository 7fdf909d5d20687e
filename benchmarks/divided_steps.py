"""What communication adds to steps of models that are divided over the ranks: a row of a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from measuring import Samples, quartiles
from names import GLOO_GROUP, OURS

# torch's backend that moves nothing.
FAKE = "fake"


def added_to(seconds: Mapping[str, Samples]) -> list[str]:
    """Return a step on `fake`, what others add in ms, their ratio, and ours over `fake`."""
    milli = {name: [1e3 * each for each in samples] for name, samples in seconds.items()}
    added = {
        name: [one - none for one, none in zip(milli[name], milli[FAKE], strict=True)]
        for name in (OURS, GLOO_GROUP)
    }
    row = [f"{statistics.median(milli[FAKE]):.1f}"]
    for samples in added.values():
        low, middle, high = quartiles(samples)
        row.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    ours, gloo = (statistics.median(samples) for samples in added.values())
    row.append(f"{ours / gloo:.3f}" if gloo > 0 else "")
    row.append(f"{statistics.median(milli[OURS]) / statistics.median(milli[FAKE]):.2f}")
    return row

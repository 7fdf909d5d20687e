"""Draw the largest model that each way can train within some memory, and what a step takes.

python benchmarks/plot_largest.py RESULTS.json FILE.svg
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plot import GLOOS, describe

OURS = "#0b6e4f"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write the plot as SVG.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mpiddp"  # the same file from the same results
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text: a third of the size
    from matplotlib import pyplot

    ways = results["ways"][::-1]  # from the bottom
    names = [each["name"] for each in ways]
    colours = [OURS if name.startswith("mpiddp") else GLOOS for name in names]
    figure, (size, time) = pyplot.subplots(1, 2, figsize=(10, 3), sharey=True)
    for axes, values, title in (
        (
            size,
            [each["parameters"] / 1e6 for each in ways],
            f"million parameters within {results['limit'] / 2**30:g} GiB",
        ),
        (
            time,
            [1e3 * statistics.median(each["seconds"]) for each in ways],
            f"ms a step of {results['layers of all']} layers",
        ),
    ):
        bars = axes.barh(names, values, color=colours)
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
        axes.margins(x=0.12)
        axes.set_title(title, fontsize=10)
    figure.suptitle(f"AdamW, float32, {describe(results, results['ranks'])}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Read results and write the plot."""
    source, target = (Path(argument) for argument in sys.argv[1:])
    draw(json.loads(source.read_text(encoding="utf-8")), target)


if __name__ == "__main__":
    main()

"""Draw steps between hosts over their bound: a panel for each layout of hosts and each rate.

python benchmarks/plot_hosts.py RESULTS.json FILE.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measuring import over_bound
from names import GLOO, GLOO_FP16, OURS, OURS_FP16, OURS_MPI
from plot import GLOOS

# In the order of the points; with a hook, the same form, hollow.
MARKS = {
    OURS: ("#0b6e4f", "o", True),
    OURS_MPI: ("#66b28f", "D", True),
    GLOO: (GLOOS, "s", True),
    OURS_FP16: ("#0b6e4f", "o", False),
    GLOO_FP16: (GLOOS, "s", False),
}


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

    records = results["between_hosts"]
    layouts = list(dict.fromkeys((each["nodes"], each["ranks"]) for each in records))
    rates = list(dict.fromkeys(each["gigabits"] for each in records))
    figure, grid = pyplot.subplots(
        len(layouts),
        len(rates),
        figsize=(8.6, 0.8 + 2.7 * len(layouts)),
        layout="constrained",
        sharey="col",
        squeeze=False,
        width_ratios=[len({r["model"] for r in records if r["gigabits"] == g}) for g in rates],
    )
    for row, (nodes, ranks) in zip(grid, layouts, strict=True):
        for axes, rate in zip(row, rates, strict=True):
            here = [
                each
                for each in records
                if (each["nodes"], each["ranks"], each["gigabits"]) == (nodes, ranks, rate)
            ]
            _draw_points(axes, here)
            axes.set_title(f"{nodes} hosts x {ranks // nodes}, {rate:g} Gbit/s", fontsize=9)
        row[0].set_ylabel("step / bound", fontsize=8)
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", fontsize=8, ncols=len(MARKS))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_points(axes: Any, records: list[Mapping[str, Any]]) -> None:
    """Draw a point with its spread for each candidate of each model; 1 is the bound."""
    for place, (name, (colour, form, filled)) in enumerate(MARKS.items()):
        at, middles, below, above = [], [], [], []
        for model, record in enumerate(records):
            measured = {each["candidate"]: each for each in record["records"] if each["views"]}
            value = over_bound(record, measured[name]) if name in measured else None
            if value is not None:
                at.append(model + 0.15 * (place - (len(MARKS) - 1) / 2))
                middles.append(value[0])
                below.append(value[0] - value[1])
                above.append(value[2] - value[0])
        axes.errorbar(
            at,
            middles,
            [below, above],
            fmt=form,
            color=colour,
            markersize=5,
            markerfacecolor=colour if filled else "white",
            elinewidth=0.8,
            label=name,
        )
    axes.axhline(1, color="#9a9a9a", linewidth=1)
    models = [each["model"].replace(" x ", " x\n").replace(", ", ",\n") for each in records]
    axes.set_xticks(range(len(models)), models, fontsize=7)
    axes.set_xlim(-0.5, len(models) - 0.5)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(axis="y", linewidth=0.4, color="#dddddd")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))

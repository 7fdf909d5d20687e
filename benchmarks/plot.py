"""Draw results as plots for the README: exposed time in units of torch DDP's on Gloo.

python benchmarks/plot.py RESULTS.json FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from measuring import exposed, ratio
from names import (
    FLATTENED,
    GLOO,
    HOROVOD,
    LIMIT,
    ONE_EACH,
    OUR_BACKEND,
    OURS,
    OURS_MPI,
    TORCH_MPI,
)

# From dark to light, in the order of the bars.
COLOURS = {
    LIMIT: "#9a9a9a",
    OURS: "#0b6e4f",
    OURS_MPI: "#66b28f",
    OUR_BACKEND: "#c7dfd2",
    FLATTENED: "#e0a458",
    ONE_EACH: "#f2d6ae",
    TORCH_MPI: "#8d99ae",
    HOROVOD: "#c9cfdb",
}
SMALLEST = 0.01


def shares(result: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Return each candidate's exposed time over Gloo's and its spread, with views on."""
    samples = {
        record["candidate"]: exposed(record)
        for record in result["records"]
        if record["views"] in (True, None)
    }
    if GLOO not in samples:
        return {}
    measured = {name: ratio(samples[name], samples[GLOO]) for name in COLOURS if name in samples}
    return {name: value for name, value in measured.items() if value is not None}


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write one SVG for each number of ranks; return the files.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mpiddp"  # the same file from the same results
    from matplotlib import pyplot

    written = []
    for ranks in sorted({result["ranks"] for result in results.get("exposed", ())}):
        groups = {
            result["model"]: drawn
            for result in results["exposed"]
            if result["ranks"] == ranks and (drawn := shares(result))
        }
        names = [name for name in COLOURS if any(name in drawn for drawn in groups.values())]
        if not names:
            continue
        figure, axes = pyplot.subplots(figsize=(10, 4.6), layout="constrained")
        width = 0.85 / len(names)
        for place, name in enumerate(names):
            here = [(at, drawn[name]) for at, drawn in enumerate(groups.values()) if name in drawn]
            middles = [max(middle, SMALLEST) for _, (middle, _, _) in here]
            below = [
                middle - min(max(low, SMALLEST), middle)
                for middle, (_, (_, low, _)) in zip(middles, here, strict=True)
            ]
            above = [
                max(high - middle, 0.0)
                for middle, (_, (_, _, high)) in zip(middles, here, strict=True)
            ]
            axes.bar(
                [at + (place - (len(names) - 1) / 2) * width for at, _ in here],
                middles,
                width,
                color=COLOURS[name],
                edgecolor="#333333",
                linewidth=0.4,
                label=name,
                yerr=[below, above],
                error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
            )
        axes.axhline(1, color="#b23a48", linewidth=1.2, label=GLOO)
        axes.set_yscale("log")
        axes.set_ylim(bottom=SMALLEST)
        axes.set_yticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2], minor=False)
        axes.get_yaxis().set_major_formatter("{x:g}")
        axes.get_yaxis().set_minor_formatter("")
        axes.set_xticks(range(len(groups)), [model.replace(", ", ",\n") for model in groups])
        axes.set_ylabel("exposed time / that of Gloo")
        machine = results["machine"]
        axes.set_title(
            f"{ranks} ranks on {machine['cores']} cores of {machine['processor']}, "
            f"{machine['mpi'].split(',')[0]}, torch {machine['versions']['torch']}, views on",
            fontsize=9,
        )
        figure.legend(loc="outside lower center", fontsize=8, ncols=4)
        path = folder / f"exposed-{ranks}-ranks.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        written.append(path)
    return written


if __name__ == "__main__":
    loaded = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for file in draw(loaded, Path(sys.argv[2])):
        print(file)

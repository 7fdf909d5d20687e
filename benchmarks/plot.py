"""Draw results as plots: what averaging adds to a step, and whole steps with the optimizer.

python benchmarks/plot.py RESULTS.json ... FOLDER

Both are in units of torch's DDP on Gloo, in one file for each number of ranks. Of files that have
both, as results/openmpi.json and results/optimizer-openmpi.json, the second is below the first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import exposed, ratio
from names import (
    ALONE,
    FLATTENED,
    GLOO,
    GLOO_ZERO,
    HOROVOD,
    LIMIT,
    ONE_EACH,
    OUR_BACKEND,
    OURS,
    OURS_MPI,
    OURS_NODE,
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
COLOURS_OF_OPTIMIZERS = {
    OURS_NODE: "#16425b",
    OURS: COLOURS[OURS],
    GLOO_ZERO: "#8d5a97",
    ALONE: "#dcdcdc",
}
# The plain one, whose step is the longest, and the fastest of torch.
OPTIMIZERS = ("AdamW", "AdamW, fused")
SMALLEST = 0.01
LARGEST = 1.6  # of whole steps; what is above is written beside its bar
GLOOS = "#b23a48"

Spread = tuple[float, float, float]


def shares(result: Mapping[str, Any]) -> dict[str, Spread]:
    """Return each candidate's exposed time over Gloo's and its spread, with views on."""
    samples = {
        record["candidate"]: exposed(record)
        for record in result["records"]
        if record["views"] in (True, None)
    }
    return over_gloo(samples, COLOURS)


def over_gloo(samples: Mapping[str, list[float]], names: Mapping[str, str]) -> dict[str, Spread]:
    """Return the times of those of `names` that were measured, over Gloo's."""
    if GLOO not in samples:
        return {}
    measured = {name: ratio(samples[name], samples[GLOO]) for name in names if name in samples}
    return {name: value for name, value in measured.items() if value is not None}


def groups_of_steps(results: Mapping[str, Any], ranks: int) -> dict[str, dict[str, Spread]]:
    """Return what averaging adds to a step of each model, over what Gloo adds."""
    return {
        result["model"].replace(", ", ",\n"): drawn
        for result in results.get("exposed", ())
        if result["ranks"] == ranks and (drawn := shares(result))
    }


def groups_of_optimizers(results: Mapping[str, Any], ranks: int) -> dict[str, dict[str, Spread]]:
    """Return whole steps of each model with each of `OPTIMIZERS`, over Gloo's."""
    samples: dict[str, dict[str, list[float]]] = {}
    for optimizer in OPTIMIZERS:
        for record in results.get("optimizers", ()):
            if (record["ranks"], record["optimizer"]) == (ranks, optimizer):
                name = f"{record['model']},\n{optimizer}"
                samples.setdefault(name, {})[record["candidate"]] = record["step"]
    drawn = {name: over_gloo(each, COLOURS_OF_OPTIMIZERS) for name, each in samples.items()}
    return {name: each for name, each in drawn.items() if each}


def draw_bars(
    axes: Any, groups: Mapping[str, Mapping[str, Spread]], colours: Mapping[str, str], least: float
) -> None:
    """Draw a group of bars for each model, and Gloo as a line at 1."""
    names = [name for name in colours if any(name in drawn for drawn in groups.values())]
    width = 0.85 / len(names)
    for place, name in enumerate(names):
        here = [(at, drawn[name]) for at, drawn in enumerate(groups.values()) if name in drawn]
        middles = [max(middle, least) for _, (middle, _, _) in here]
        below = [
            middle - min(max(low, least), middle)
            for middle, (_, (_, low, _)) in zip(middles, here, strict=True)
        ]
        above = [
            max(high - middle, 0.0) for middle, (_, (_, _, high)) in zip(middles, here, strict=True)
        ]
        axes.bar(
            [at + (place - (len(names) - 1) / 2) * width for at, _ in here],
            middles,
            width,
            color=colours[name],
            edgecolor="#333333",
            linewidth=0.4,
            label=name,
            yerr=[below, above],
            error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
        )
        if least > 0:
            continue
        for at, (middle, _, _) in here:
            if middle > LARGEST:
                right = at + (place - (len(names) - 1) / 2 + 0.6) * width
                axes.text(right, 0.94 * LARGEST, f"{middle:.1f}", fontsize=8)
    axes.axhline(1, color=GLOOS, linewidth=1.2, label=GLOO)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=9 if len(groups) < 8 else 8)


def describe(results: Mapping[str, Any], ranks: int) -> str:
    """Return what figures depend on, as a title."""
    machine = results["machine"]
    return (
        f"{ranks} ranks on {machine['cores']} cores of {machine['processor']}, "
        f"{machine['mpi'].split(',')[0]}, torch {machine['versions']['torch']}"
    )


def draw(files: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write one SVG for each number of ranks; return the files.

    Args:
        files: results of runs, of whatever parts.
        folder: where plots are put.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mpiddp"  # the same file from the same results
    matplotlib.rcParams["svg.fonttype"] = "path"  # it looks alike wherever README.md is read
    from matplotlib import pyplot

    kinds = [(results, kind) for results in files for kind in ("exposed", "optimizers")]
    every = {each["ranks"] for results, kind in kinds for each in results.get(kind, ())}
    written = []
    for ranks in sorted(every):
        steps = [(r, drawn) for r in files if (drawn := groups_of_steps(r, ranks))][:1]
        whole = [(r, drawn) for r in files if (drawn := groups_of_optimizers(r, ranks))][:1]
        if not steps and not whole:
            continue
        heights = [4.2] * len(steps) + [3.2] * len(whole)
        figure, column = pyplot.subplots(
            len(heights),
            figsize=(10, 0.6 + sum(heights)),
            layout="constrained",
            height_ratios=heights,
            squeeze=False,
        )
        panels = [axes for (axes,) in column]
        for axes, (results, drawn) in zip(panels, steps, strict=False):
            draw_bars(axes, drawn, COLOURS, SMALLEST)
            axes.set_yscale("log")
            axes.set_ylim(bottom=SMALLEST)
            axes.set_yticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2], minor=False)
            axes.get_yaxis().set_major_formatter("{x:g}")
            axes.get_yaxis().set_minor_formatter("")
            axes.set_ylabel("exposed time / that of Gloo")
            axes.set_title(
                f"What averaging adds to a step. {describe(results, ranks)}, views on", fontsize=9
            )
        for axes, (results, drawn) in zip(panels[len(steps) :], whole, strict=True):
            draw_bars(axes, drawn, COLOURS_OF_OPTIMIZERS, 0.0)
            axes.set_ylim(top=LARGEST)
            axes.set_ylabel("step / that of Gloo")
            axes.set_title(
                f"Whole steps with the optimizer. {describe(results, ranks)}", fontsize=9
            )
        labels = {}
        for axes in panels:
            handles, names = axes.get_legend_handles_labels()
            labels |= {name: handle for handle, name in zip(handles, names, strict=True)}
        figure.legend(labels.values(), labels, loc="outside lower center", fontsize=8, ncols=5)
        path = folder / f"{'exposed' if steps else 'optimizer'}-{ranks}-ranks.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        written.append(path)
    return written


if __name__ == "__main__":
    *results, target = sys.argv[1:]
    loaded = [json.loads(Path(name).read_text(encoding="utf-8")) for name in results]
    for file in draw(loaded, Path(target)):
        print(file)

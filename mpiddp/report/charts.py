"""The charts of the page, as what Plotly takes: data and layout, in Python's dictionaries.

Plotly's defaults draw them. What is large travels as bytes in base64, and is thinned before.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiddp.report import parts
from mpiddp.report.summary import Summary

__all__ = ["Chart", "charts"]

# More ranks than that are a heat map in the timeline, and fewer have a row for their buckets.
_MOST_BARS = 64
_MOST_BUCKET_ROWS = 16
# Pixels of a heat map, which are more than a screen has.
_MOST_ROWS, _MOST_COLUMNS = 1024, 600

# Of Okabe and Ito, whom colour-blind people can follow; legible on white and on black.
_COLOURS = {
    parts.FORWARD: "#56b4e9",
    parts.LOSS: "#9467bd",
    parts.BACKWARD: "#0072b2",
    parts.EXPOSED: "#d55e00",
    parts.WAITING: "#e6b800",
    parts.OPTIMIZER: "#009e73",
    parts.DATA: "#cc79a7",
    parts.CHECKPOINT: "#7f4f24",
    parts.COLLECTIVES: "#b2182b",
    parts.OTHER: "#9a9a9a",
}
_BUCKET = "#f0a37a"


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        name: its id in the page.
        title: the heading above it.
        words: what it shows, and how to read it.
        data: the traces of Plotly.
        layout: the layout of Plotly, without colours that depend on the theme.
        height: in pixels.
        legend: the colour of what is in it, by name; a bar or a heat map has none of its own.
    """

    name: str
    title: str
    words: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int
    legend: dict[str, str] = field(default_factory=dict)


def charts(summary: Summary) -> list[Chart]:
    """Return all charts of a report. Not collective."""
    durations = summary.steps.durations.max(axis=0)
    typical = int(np.argmin(np.abs(durations - np.median(durations))))
    longest = int(np.argmax(durations))
    made = [_late(summary), _timeline(summary, typical, "typical", "a typical step")]
    if longest != typical:
        made.append(_timeline(summary, longest, "longest", "the longest step"))
    made += [_overlap(summary), _histogram(summary)]
    return made


def packed(values: NDArray[Any]) -> dict[str, str]:
    """Return an array as Plotly reads it from bytes. Not collective."""
    kind = {"f": "f4", "i": "i4", "u": "u1"}[values.dtype.kind]
    data = np.ascontiguousarray(values, dtype=f"<{kind}")
    made = {"dtype": kind, "bdata": base64.b64encode(data.tobytes()).decode()}
    if values.ndim == 2:
        made["shape"] = ", ".join(str(length) for length in values.shape)
    return made


def _late(summary: Summary) -> Chart:
    late = summary.steps.reductions.late / 1e3
    ranks = np.array([rank.rank for rank in summary.trace.ranks])
    numbers = summary.steps.numbers
    late, ranks = _thinned(late, ranks, _MOST_ROWS)
    turned, numbers = _thinned(late.T, numbers, _MOST_COLUMNS)
    heat = {
        "type": "heatmap",
        "z": packed(turned.T.astype("f4")),
        "x": packed(numbers.astype("i4")),
        "y": packed(ranks.astype("i4")),
        "colorscale": "Cividis",
        "zmin": 0,
        "colorbar": {"title": {"text": "ms", "side": "top"}, "thickness": 12, "x": 1.01},
        "hovertemplate": "step %{x}, rank %{y}: %{z:.2f} ms late<extra></extra>",
    }
    return Chart(
        "late",
        "Which rank is late",
        "How much later than the first rank each has launched its last bucket, by "
        "step. A rank that "
        "all wait for is a bright stripe.",
        [heat],
        {
            "xaxis": _axis("step", **_whole(len(numbers))),
            "yaxis": _axis("rank", autorange="reversed", **_whole(len(ranks))),
        },
        360,
    )


def _thinned(
    values: NDArray[np.float64], numbers: NDArray[np.int64], most: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return at most so many rows: of several, the highest values and the first number."""
    if len(values) <= most:
        return values, numbers
    starts = np.unique(np.linspace(0, len(values), most, endpoint=False).astype(int))
    return np.maximum.reduceat(values, starts, axis=0), numbers[starts]


def _timeline(summary: Summary, step: int, name: str, words: str) -> Chart:
    number = int(summary.steps.numbers[step])
    title = f"{words[0].upper()}{words[1:]}: step {number}"
    began = float(summary.steps.windows[:, step, 0].min())
    if len(summary.trace.ranks) > _MOST_BARS:
        return _timeline_of_many(summary, step, name, title, began)
    rows: dict[int, dict[str, list[Any]]] = {}
    shows_buckets = len(summary.trace.ranks) <= _MOST_BUCKET_ROWS
    labels = []
    for place, rank in enumerate(summary.trace.ranks):
        labels.append(f"rank {rank.rank}")
        window = summary.steps.windows[place, step]
        for part, start, end in summary.steps.stretches[place].between(*window):
            _add_bar(rows.setdefault(part, _no_bars()), labels[-1], start - began, end - start)
        if shows_buckets and len(rank.buckets):
            labels.append(f"its buckets {rank.rank}")
    data = [
        _bars(parts.NAMES[part], _COLOURS[part], rows[part]) for part in parts.NAMES if part in rows
    ]
    if shows_buckets:
        data.append(_buckets(summary, step, began))
    layout = {
        "barmode": "overlay",
        "bargap": 0.15,
        "xaxis": _axis("ms"),
        "yaxis": {
            "automargin": True,
            "categoryorder": "array",
            "categoryarray": labels,
            "autorange": "reversed",
            "tickvals": [label for label in labels if label.startswith("rank")],
        },
        "showlegend": False,
    }
    legend = {parts.NAMES[part]: _COLOURS[part] for part in parts.NAMES if part in rows}
    if shows_buckets:
        legend["a bucket is under way"] = _BUCKET
    explained = "What each rank did. Drag to zoom, click twice to go back."
    if shows_buckets:
        explained += (
            " Below each rank are its buckets, each from when it was launched until it was reduced."
        )
    height = 110 + max(len(labels) * 24, 90)
    return Chart(name, title, explained, data, layout, height, legend)


def _no_bars() -> dict[str, list[Any]]:
    return {"y": [], "base": [], "x": []}


def _add_bar(bars: dict[str, list[Any]], row: str, began: float, length: float) -> None:
    bars["y"].append(row)
    bars["base"].append(round(began / 1e3, 4))
    bars["x"].append(round(length / 1e3, 4))


def _bars(name: str, colour: str, bars: dict[str, list[Any]], **more: Any) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "marker": {"color": colour, "line": {"width": 0}},
        "hovertemplate": f"%{{y}}, {name}<br>%{{x:.3f}} ms from %{{base:.3f}}<extra></extra>",
        **bars,
        **more,
    }


def _buckets(summary: Summary, step: int, began: float) -> dict[str, Any]:
    bars, texts = _no_bars(), []
    for place, rank in enumerate(summary.trace.ranks):
        first, last = summary.steps.windows[place, step]
        for row in rank.buckets:
            if first <= row["reduced"] <= last + 0.01:
                length = float(row["reduced"] - row["launched"])
                label = f"its buckets {rank.rank}"
                _add_bar(bars, label, float(row["launched"]) - began, length)
                texts.append(f"rank {rank.rank}, bucket {row['bucket']}")
    made = _bars("a bucket is under way", _BUCKET, bars, customdata=texts, opacity=0.55)
    made["hovertemplate"] = (
        "%{customdata}<br>%{x:.3f} ms from launch, at %{base:.3f}, to the mean<extra></extra>"
    )
    made["marker"]["line"] = {"width": 1, "color": "#a04000"}
    return made


def _timeline_of_many(summary: Summary, step: int, name: str, title: str, began: float) -> Chart:
    """Return a picture of which part each rank was in, by time."""
    shown = np.unique(np.linspace(0, len(summary.trace.ranks) - 1, _MOST_ROWS).astype(int))
    ended = float(summary.steps.windows[:, step, 1].max())
    edges = np.linspace(began, ended, _MOST_COLUMNS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    which = np.empty((len(shown), _MOST_COLUMNS), np.uint8)
    order = list(parts.NAMES)
    places = np.zeros(len(parts.NAMES), np.uint8)
    places[order] = np.arange(len(order))
    for line, place in enumerate(shown):
        mine = summary.steps.stretches[place]
        at = np.searchsorted(mine.began, middles, side="right") - 1
        which[line] = places[mine.part[np.maximum(at, 0)]]
    stops = [
        [(place + end) / len(order), _COLOURS[part]]
        for place, part in enumerate(order)
        for end in (0, 1)
    ]
    heat = {
        "type": "heatmap",
        "z": packed(which),
        "x0": (edges[1] - edges[0]) / 2e3,
        "dx": (edges[1] - edges[0]) / 1e3,
        "y": packed(np.array([summary.trace.ranks[place].rank for place in shown], "i4")),
        "zmin": -0.5,
        "zmax": len(order) - 0.5,
        "colorscale": stops,
        "showscale": False,
        "hovertemplate": "rank %{y}, %{x:.2f} ms<extra></extra>",
    }
    return Chart(
        name,
        title,
        f"What each rank did, to {(edges[1] - edges[0]) / 1e3:.2f} ms. Drag to zoom, "
        f"click twice to "
        f"go back. For every detail open trace.json.gz at ui.perfetto.dev.",
        [heat],
        {
            "xaxis": _axis("ms", range=[0, (ended - began) / 1e3]),
            "yaxis": _axis("rank", range=[summary.trace.ranks[-1].rank + 0.5, -0.5]),
        },
        560,
        {parts.NAMES[p]: _COLOURS[p] for place, p in enumerate(order) if (which == place).any()},
    )


def _overlap(summary: Summary) -> Chart:
    steps = summary.steps
    numbers = packed(steps.numbers.astype("i4"))
    lines: dict[str, tuple[NDArray[Any], str]] = {
        "hidden behind backward": (steps.reductions.hidden, _COLOURS[parts.BACKWARD]),
        "exposed communication": (steps.reductions.exposed, _COLOURS[parts.EXPOSED]),
        "waiting for the slowest rank": (
            steps.times[:, :, parts.WAITING],
            _COLOURS[parts.WAITING],
        ),
    }
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers" if len(steps.numbers) < 200 else "lines",
            "marker": {"size": 4},
            "name": name,
            "x": numbers,
            "y": packed(values.mean(axis=0).astype("f4") / np.float32(1e3)),
            "line": {"color": colour, "width": 2},
            "hovertemplate": f"step %{{x}}: %{{y:.2f}} ms {name}<extra></extra>",
        }
        for name, (values, colour) in lines.items()
    ]
    return Chart(
        "overlap",
        "Overlap over time",
        "How long communication was hidden and exposed in each step, and how long ranks waited for "
        "the slowest, in the mean of all ranks.",
        data,
        {
            "xaxis": _axis("step", **_whole(len(steps.numbers))),
            "yaxis": _axis("ms", rangemode="tozero"),
            "legend": {"orientation": "h", "y": -0.25, "yanchor": "top"},
        },
        360,
    )


def _histogram(summary: Summary) -> Chart:
    longest = summary.steps.durations.max(axis=0) / 1e3
    data = [
        {
            "type": "histogram",
            "x": packed(longest.astype("f4")),
            "nbinsx": 40,
            "marker": {"color": _COLOURS[parts.FORWARD], "line": {"width": 1, "color": "#0072b2"}},
            "hovertemplate": "%{x} ms: %{y} steps<extra></extra>",
        }
    ]
    return Chart(
        "histogram",
        "How long steps take",
        "How many steps took how long, each on the rank where it took longest.",
        data,
        {"xaxis": _axis("ms"), "yaxis": _axis("steps"), "bargap": 0.03},
        300,
    )


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "automargin": True, **more}


def _whole(number: int) -> dict[str, Any]:
    """Return how an axis of so many whole numbers is marked."""
    return {"dtick": 1} if number <= 10 else {"tickformat": "d"}

"""The report as one HTML file that needs nothing else, with charts by Plotly.

The package `plotly` carries the library; its text is put into the file. The browser is told to load
nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from mpiddp.findings import Finding
from mpiddp.report.charts import Chart, charts
from mpiddp.report.summary import Summary
from mpiddp.report.tables import Table, headline, overlap_line, tables

__all__ = ["NoCharts", "write"]

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)

_STYLE = """
:root { color-scheme: light dark; --line: #c4c4c4; --paper: #ffffff; --ink: #1b1b1b;
        --soft: #f3f5f7; --mark: #b34700; }
@media (prefers-color-scheme: dark) {
  :root { --line: #4a4f55; --paper: #14171a; --ink: #e8e8e8; --soft: #1f2429; --mark: #ffa366; }
}
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
       margin: 0 auto; max-width: 1200px; padding: 0 16px 48px; }
h1 { font-size: 1.6rem; margin: 24px 0 4px; } h2 { font-size: 1.2rem; margin: 36px 0 8px; }
p { margin: 6px 0; max-width: 75ch; }
ol.findings { padding-left: 1.6em; } ol.findings li { margin: 0 0 14px; max-width: 80ch; }
.remedy { border-left: 4px solid var(--mark); display: block; margin-top: 4px; padding-left: 10px; }
.wide { overflow-x: auto; } .wide:focus { outline: 2px solid var(--mark); }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: 4px 10px; text-align: left;
         white-space: nowrap; }
td.long { min-width: 12em; white-space: normal; }
ul.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; list-style: none; margin: 8px 0;
            padding: 0; font-size: 0.9rem; }
ul.legend span { border-radius: 2px; display: inline-block; height: 12px; margin-right: 6px;
                 width: 12px; }
th { background: var(--soft); } .number { text-align: right; }
"""

# Draws what the page holds, in the colours of the reader's theme.
_SCRIPT = """
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const colours = () => {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink"), line = style.getPropertyValue("--line");
  return {
    "font.color": ink, "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
    "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": line, "modebar.activecolor": ink,
    "xaxis.gridcolor": line, "yaxis.gridcolor": line,
    "xaxis.zerolinecolor": line, "yaxis.zerolinecolor": line
  };
};
const charts = JSON.parse(document.getElementById("charts").textContent);
const drawn = charts.map(chart => {
  const layout = Object.assign({margin: {l: 10, r: 10, t: 32, b: 10}, height: chart.height},
                               chart.layout);
  const settings = {responsive: true, displaylogo: false, displayModeBar: true,
                    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d",
                                      "toImage"]]};
  return Plotly.newPlot(chart.name, chart.data, layout, settings)
    .then(() => Plotly.relayout(chart.name, colours()));
});
Promise.all(drawn).then(() => {
  document.body.dataset.drawn = charts.length;
  document.body.dataset.milliseconds = Math.round(performance.now());
});
dark.addEventListener("change", () => {
  for (const chart of charts) Plotly.relayout(chart.name, colours());
});
"""


class NoCharts(Exception):
    """The library that draws is missing; the text says what to install."""


def write(path: Path, summary: Summary, findings: Sequence[Finding]) -> None:
    """Write the page. Not collective.

    Raises:
        NoCharts: plotly is not installed.
        OSError: the file cannot be written.
    """
    library = _library()
    drawn = charts(summary)
    listed = tables(summary)
    body = [
        f"<h1>Where the time goes</h1>\n<p>{escape(headline(summary))}</p>",
        _findings(findings),
        _table(listed[0], overlap_line(summary)),
        *(_chart(chart) for chart in drawn),
        *(_table(table) for table in listed[1:]),
    ]
    data = [{"name": c.name, "data": c.data, "layout": c.layout, "height": c.height} for c in drawn]
    # Nothing in it can end the element that holds it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as out:
        out.write('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n')
        out.write(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n')
        out.write('<meta name="viewport" content="width=device-width, initial-scale=1">\n')
        out.write('<link rel="icon" href="data:,">\n')
        out.write(f"<title>mpiddp report: {escape(headline(summary))}</title>\n")
        out.write(f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n")
        out.write("\n".join(body))
        out.write("\n</main>\n")
        out.write(f'<script type="application/json" id="charts">{text}</script>\n')
        out.write(f"<script>{library}</script>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n")
    part.replace(path)


def _library() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise NoCharts(
            "no page with charts is written, since plotly is not installed: "
            "pip install 'mpiddp[report]'"
        ) from None
    text: str = get_plotlyjs()
    return text.replace("</script", "<\\/script")


def _findings(findings: Sequence[Finding]) -> str:
    items = []
    for finding in findings:
        said = _marked(finding.text[0].upper() + finding.text[1:])
        remedy = f'<span class="remedy">{_marked(finding.remedy)}</span>' if finding.remedy else ""
        items.append(f"<li>{said}.{remedy}</li>")
    lines = "\n".join(items)
    return (
        f'<section aria-labelledby="h-findings">\n<h2 id="h-findings">What to change</h2>\n'
        f'<ol class="findings">\n{lines}\n</ol>\n</section>'
    )


def _marked(text: str) -> str:
    """Return a text whose names in ` are set as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _table(table: Table, after: str = "") -> str:
    name = f"h-{'-'.join(table.title.lower().replace(',', '').split())}"
    head = "".join(_cell("th", table, place, word) for place, word in enumerate(table.head))
    rows = "\n".join(
        f"<tr>{''.join(_cell('td', table, place, word) for place, word in enumerate(row))}</tr>"
        for row in table.rows
    )
    below = "".join(f"\n<p>{escape(text)}</p>" for text in (table.note, after) if text)
    return (
        f'<section aria-labelledby="{name}">\n<h2 id="{name}">{escape(table.title)}</h2>\n'
        f'<div class="wide" tabindex="0" role="region" aria-labelledby="{name}">\n'
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>{below}\n"
        f"</section>"
    )


def _cell(kind: str, table: Table, place: int, word: str) -> str:
    classes = ["number"] if place >= table.words else []
    if len(word) > 30:
        classes.append("long")
    of = f' class="{" ".join(classes)}"' if classes else ""
    scope = ' scope="col"' if kind == "th" else ""
    return f"<{kind}{of}{scope}>{escape(word)}</{kind}>"


def _chart(chart: Chart) -> str:
    entries = "".join(
        f'<li><span style="background:{colour}"></span>{escape(name)}</li>'
        for name, colour in chart.legend.items()
    )
    legend = f'<ul class="legend">{entries}</ul>\n' if entries else ""
    return (
        f'<section aria-labelledby="h-{chart.name}">\n<h2 id="h-{chart.name}">{escape(chart.title)}'
        f"</h2>\n<p>{escape(chart.words)}</p>\n{legend}"
        f'<div id="{chart.name}" class="chart" role="img" aria-label="{escape(chart.title)}" '
        f'style="height:{chart.height}px"></div>\n</section>'
    )

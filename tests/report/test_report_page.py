"""The page of a report: what is in it, and that a browser draws its charts and loads nothing."""

import html.parser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_traces import MadeJob

from mpiddp.report import charts, page, summary, trace_files
from mpiddp.report.__main__ import main

pytest.importorskip("plotly", reason="plotly is not installed: there are no pages without it")
pytestmark = [pytest.mark.once, pytest.mark.timeout(200)]

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")


def late(rank, step):
    return 20 + (9 if rank == 1 and step > 8 else 0)


def make(folder, **job):
    MadeJob(backward=late, forward=lambda rank, step: 10 + (step == 15), **job).write(folder)
    assert main([str(folder)]) == 0
    return folder / "report.html"


def opened(path: Path, *options: str) -> str:
    """Return the document as it is when all scripts have run; nothing may be complained of."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={path.parent / 'browser'}", "--enable-logging=stderr", "--v=0"]
    # Nobody can be reached.
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", *options]
    done = subprocess.run(
        [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=150
    )
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == []
    return done.stdout


class _Page(html.parser.HTMLParser):
    """Collects what stands in a page, and what it would load."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loads, self.words, self._in = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self._in.append(tag)
        self.loads += [
            v
            for name, v in attrs
            if name in ("src", "href", "action") and not v.startswith("data:")
        ]

    def handle_endtag(self, tag):
        self._in.pop()

    def handle_data(self, data):
        if self._in and self._in[-1] not in ("script", "style"):
            self.words.append(data)


def test_what_is_in_it(tmp_path):
    read = _Page(make(tmp_path).read_text())
    assert read.loads == []
    tags = [tag for tag, _ in read.tags]
    assert tags.count("title") == tags.count("h1") == tags.count("main") == 1
    assert ("html", {"lang": "en"}) in read.tags
    ids = [a["id"] for _, a in read.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for tag, attributes in read.tags:
        if tag == "section":
            assert attributes["aria-labelledby"] in ids
    policy = next(a["content"] for t, a in read.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert [a["id"] for _, a in read.tags if a.get("class") == "chart"] == [
        "late", "typical", "longest", "overlap", "histogram",
    ]  # fmt: skip
    text = " ".join(read.words)
    assert "All wait for rank 1 on n0 since step 9" in text
    assert "75 % of communication is hidden" in text


def test_names_are_no_code(tmp_path):
    evil = "</script><b>x</b>"
    job = MadeJob(steps=5, facts={"host": evil})
    made = summary.summarize(trace_files.read(job.write(tmp_path)))
    page.write(tmp_path / "report.html", made, [])
    read = _Page((tmp_path / "report.html").read_text())
    assert "b" not in [tag for tag, _ in read.tags]
    assert evil in read.words


def test_plotly_takes_the_charts(tmp_path):
    """Its Python half knows each property that there is."""
    import plotly.graph_objects

    for ranks in (4, 40, 70):
        folder = tmp_path / str(ranks)
        made = summary.summarize(trace_files.read(MadeJob(ranks=ranks, steps=5).write(folder)))
        for chart in charts.charts(made):
            plotly.graph_objects.Figure(data=chart.data, layout=chart.layout)


def test_heat_map_keeps_the_latest_of_those_it_puts_together(monkeypatch, tmp_path):
    import base64

    import numpy as np

    monkeypatch.setattr(charts, "_MOST_ROWS", 8)
    job = MadeJob(ranks=32, steps=12, backward=lambda r, step: 20 + 9 * (r == 19))
    made = summary.summarize(trace_files.read(job.write(tmp_path)))
    heat = charts.charts(made)[0].data[0]
    assert heat["z"]["shape"] == "8, 11"
    values = np.frombuffer(base64.b64decode(heat["z"]["bdata"]), "<f4").reshape(8, 11)
    ranks = np.frombuffer(base64.b64decode(heat["y"]["bdata"]), "<i4")
    assert list(ranks) == list(range(0, 32, 4))
    np.testing.assert_allclose(values[4], 9, atol=0.01)
    np.testing.assert_allclose(np.delete(values, 4, axis=0), 0, atol=0.01)


def test_without_plotly(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    MadeJob().write(tmp_path)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "Where the time of a step goes" in said.out
    assert "pip install 'mpiddp[report]'" in said.err
    assert main([str(tmp_path), "--html", str(tmp_path / "x.html")]) == 1


def test_where_it_cannot_be_written(tmp_path, capsys):
    MadeJob().write(tmp_path)
    assert main([str(tmp_path), "--html", str(tmp_path / "no" / "x.html")]) == 1
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


@needs_browser
@pytest.mark.parametrize(
    "options", [(), ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")]
)
def test_a_browser_draws_it(tmp_path, options):
    document = opened(make(tmp_path, ranks=6), *options)
    assert 'data-drawn="5"' in document
    assert document.count('class="main-svg"') >= 5


@needs_browser
@pytest.mark.slow
def test_a_thousand_ranks(tmp_path):
    """Read in bounded time and memory, and open in 3 s."""
    steps = {"backward": late, "forward": lambda rank, step: 10 + (step == 15)}
    MadeJob(ranks=1024, steps=51, to_a_node=16, **steps).write(tmp_path)
    program = f"""
import resource, sys
from mpiddp.report.__main__ import main
assert main([{str(tmp_path)!r}]) == 0
usage = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss, which an exec does not set back: it would be that of pytest.
(most,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
print(int(most.split()[1]) / 1024, usage.ru_utime + usage.ru_stime, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=True
    )
    assert "All wait for rank 1 on n0 since step 9" in done.stdout
    megabytes, seconds = map(float, done.stderr.split())
    assert megabytes < 700
    assert seconds < 90
    document = opened(tmp_path / "report.html")
    assert 'data-drawn="5"' in document
    (took,) = re.findall(r'data-milliseconds="(\d+)"', document)
    # At rest. Else it shares the cores with what else runs.
    busy = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    assert int(took) < 3000 * max(busy, 1)

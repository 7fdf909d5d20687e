"""What mkdocs calls to build the site: generated parts of pages, and the sources for the API.

Where a page says `<!-- generated: NAME -->`, what stands in `PARTS` under that name is put. Nothing
of mpiddp is imported: the site is built without MPI.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

import collective_tables
import fault_tables
import notes
import optimizer_tables
import other_tables
import settings_table
import slow_step_reports
import step_tables
import tested_table
import trainer_tables

ROOT = Path(__file__).resolve().parents[2]
# The same as `paths` in mkdocs.yml, and the package in it.
SOURCES = ROOT / "build" / "docs-sources" / "mpiddp"
PLOTS = ("benchmarks/results/*.svg", "benchmarks/scaling.svg")
PICTURES = (slow_step_reports.PICTURES, "how-to")

MARK = re.compile(r"<!-- generated: ([\w-]+) -->")
PARTS: dict[str, Callable[[], str]] = {
    "settings": settings_table.table,
    "notes": notes.index,
    "one-machine": step_tables.one_machine,
    "between-hosts": step_tables.between_hosts,
    "segments": step_tables.segments,
    "readme-table": step_tables.readme,
    "collectives": collective_tables.tables,
    "ways": collective_tables.ways,
    "collectives-hosts": collective_tables.between_hosts,
    "overlap": collective_tables.overlap,
    "divided": collective_tables.divided,
    "optimizers": optimizer_tables.optimizers,
    "largest-model": optimizer_tables.largest_model,
    "faults": fault_tables.faults,
    "faults-without-bound": fault_tables.without_bound,
    "faults-numbers": fault_tables.numbers,
    "sources": other_tables.sources,
    "one-bucket": other_tables.one_bucket,
    "memory": other_tables.memory,
    "lazy-buckets": other_tables.lazy_buckets,
    "versions": tested_table.versions,
    "trainers": trainer_tables.trainers,
    "construction": other_tables.construction,
    "snapshots": other_tables.snapshots,
    "starts": other_tables.starts,
    "start-calls": other_tables.start_calls,
    "slow-host": partial(slow_step_reports.whole, "slow-host"),
    "slow-rank": partial(slow_step_reports.first_finding, "slow-rank"),
    "slow-link": partial(slow_step_reports.first_finding, "slow-link"),
    "slow-link-16-bits": partial(slow_step_reports.first_finding, "slow-link-16-bits"),
    "one-large-bucket": partial(slow_step_reports.first_finding, "one-bucket"),
    "healthy-steps": partial(slow_step_reports.first_finding, "healthy"),
    "cost-model": (ROOT / "benchmarks" / "scaling.md").read_text,
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the sources and the stubs of compiled modules into one package, as installed.

    Copies, not links: griffe follows a link to `__init__.py` and then sees one half only.
    """
    shutil.rmtree(SOURCES, ignore_errors=True)
    for folder, suffixes in (("mpiddp", {".py"}), ("cython", {".pyi", ".pyx"})):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in suffixes:
                copy = SOURCES / path.relative_to(ROOT / folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the plots of the benchmarks, and pictures of reports, to the pages about them."""
    for pattern, folder in (*((plots, "performance") for plots in PLOTS), PICTURES):
        for plot in ROOT.glob(pattern):
            place = f"{folder}/{plot.name}"
            files.append(File.generated(config, place, abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the generated parts where the page asks for them."""
    return MARK.sub(lambda mark: _keep_together(PARTS[mark[1]]()), markdown)


def _keep_together(part: str) -> str:
    """Return `part` with no line break inside of a spread such as "(0.13 to 0.38)"."""
    if part.startswith("```"):  # as it was printed
        return part
    return re.sub(r"\(-?\d[^()|\n]*\)", lambda spread: spread[0].replace(" ", "&nbsp;"), part)

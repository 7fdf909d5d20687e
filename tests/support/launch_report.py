"""A pytest plugin: report every test that this process finishes, for tests/support/launch.py.

It also decides which tests belong to a run. Under mpirun these are the tests marked
`@pytest.mark.mpi(min_size=N)` with N at most the number of ranks; without, those that
are not marked.

Each process writes one file of JSON lines, flushed after each line, so that the file
says where the process was when it was killed.
"""

import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import tiers

# The ranks of `make test`, unless the number matters.
SIZE_OF_PARTS = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that the launcher uses."""
    group = parser.getgroup("launch", "how tests/support/launch.py starts pytest")
    group.addoption("--launch-report", type=Path, metavar="DIR", help="write reports to DIR")
    group.addoption(
        "--launch-ranks",
        type=int,
        metavar="N",
        help="run the tests for N ranks, with 0 those without MPI; default: all, to collect",
    )
    group.addoption(
        "--launch-part",
        choices=("short", "rest"),
        help="short: not what is marked thorough, most of it on 3 ranks only; rest: the others",
    )
    group.addoption(
        "--launch-share",
        metavar="K/N",
        help="run the K-th of N shares of the tests, of about the same size",
    )
    group.addoption(
        "--launch-claims",
        type=Path,
        metavar="DIR",
        help="run those files that no other process has claimed in DIR, in the order given",
    )
    group.addoption(
        "--launch-alone",
        choices=("only", "without"),
        help="only: what is marked alone; without: the others",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Any:
    """Start the report and, on other ranks than the first, send the output to a file.

    This is the last hook before pytest starts to capture and remembers its stdout.
    """
    options = early_config.known_args_namespace
    rank, size = 0, 0
    if options.launch_ranks:
        from mpi4py import MPI

        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    if rank > 0:
        with (options.launch_report / f"rank-{rank}.out").open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
    file = options.launch_report / f"rank-{rank}.jsonl"
    report = Report(file, rank, options.launch_ranks, options.launch_part)
    early_config.pluginmanager.register(report)
    report.write("start", size=size)
    return (yield)


def ranks_needed(item: pytest.Item) -> int:
    """Return the ranks that a test needs, 0 for a test without MPI."""
    return max((mark.kwargs.get("min_size", 1) for mark in item.iter_markers("mpi")), default=0)


def bounds(item: pytest.Item, part: str | None) -> tuple[int, int]:
    """Return the fewest and the most ranks to run a test with; (0, any) for one without MPI."""
    needed = ranks_needed(item)
    if part and needed:
        # What is simulated is a GPU, for which it makes no difference how many ranks there are.
        if item.get_closest_marker("simulated_gpu") is not None:
            return needed, max(2, needed)
        if item.get_closest_marker("sizes") is None:
            return max(SIZE_OF_PARTS, needed), sys.maxsize
    return needed, sys.maxsize


def left_out(items: list[pytest.Item]) -> set[str]:
    """Return the names of those tests that are only for thorough runs."""
    variants: dict[str, list[pytest.Item]] = {}
    keep: dict[str, int] = {}
    for item in items:
        if (mark := item.get_closest_marker("thorough")) is not None:
            function = item.nodeid.partition("[")[0]
            variants.setdefault(function, []).append(item)
            keep[function] = mark.kwargs.get("keep", 0)
    unwanted = set()
    for function, tests in variants.items():
        kept = tiers.evenly(len(tests), keep[function])
        unwanted |= {test.nodeid for index, test in enumerate(tests) if index not in kept}
    return unwanted


def in_share(test: str, share: str) -> bool:
    """Return whether a test belongs to a share, such as 2/6."""
    number, _, shares = share.partition("/")
    return zlib.crc32(test.encode()) % int(shares) == int(number) - 1


class Report:
    """The report of one process."""

    def __init__(self, path: Path, rank: int, ranks: int | None, part: str | None = None) -> None:
        self.file = path.open("w", encoding="utf-8")
        self.rank = rank
        self.ranks = ranks
        self.part = part
        self.began = 0.0
        self.outcome = ""
        self.reason = ""
        self.status = 0

    def write(self, event: str, **values: Any) -> None:
        """Append one event."""
        print(json.dumps({"event": event, **values}), file=self.file, flush=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Give each rank a folder for tmp_path: ranks race for pytest's numbered ones."""
        if self.ranks and config.option.basetemp is None:
            config.option.basetemp = config.option.launch_report / f"tmp-{self.rank}"

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what belongs to another run."""
        chosen: list[pytest.Item] = []
        others: list[pytest.Item] = []
        thorough = left_out(items)
        share = config.option.launch_share
        for item in items:
            fewest, most = bounds(item, self.part)
            belongs = not self.part or (item.nodeid in thorough) == (self.part == "rest")
            if self.ranks == 0:
                belongs = belongs and fewest == 0
            elif self.ranks is not None:
                belongs = belongs and 0 < fewest <= self.ranks <= most
            belongs = belongs and (share is None or in_share(item.nodeid, share))
            if (alone := config.option.launch_alone) is not None:
                is_alone = item.get_closest_marker("alone") is not None
                belongs = belongs and is_alone == (alone == "only")
            (chosen if belongs else others).append(item)
        if others:
            config.hook.pytest_deselected(items=others)
            items[:] = chosen

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Report what is going to run."""
        tests = {item.nodeid: bounds(item, self.part) for item in session.items}
        alone = [item.nodeid for item in session.items if item.get_closest_marker("alone")]
        files = {item.nodeid: str(item.path) for item in session.items}
        self.write("collected", tests=tests, alone=alone, files=files)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Report a file that cannot be collected."""
        if report.failed:
            self.write("failed", test=report.nodeid, text=report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the files that no other process has claimed; without claims, leave it to pytest."""
        folder: Path | None = session.config.option.launch_claims
        if folder is None or session.config.option.collectonly or session.testsfailed:
            return None
        files: dict[Path, list[pytest.Item]] = {}
        for item in session.items:
            files.setdefault(item.path, []).append(item)
        for number, items in enumerate(files.values()):
            try:
                (folder / str(number)).touch(exist_ok=False)
            except FileExistsError:
                continue
            self.write("claimed", tests=[item.nodeid for item in items])
            # After the last one of a file, all fixtures end: the next file may not be ours.
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        return True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Report which test starts."""
        self.outcome, self.reason = "passed", ""
        self.began = time.monotonic()
        self.write("running", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report a failure at once, and the outcome after the teardown."""
        if report.failed:
            self.outcome = "failed"
            self.write("failed", test=report.nodeid, text=report.longreprtext)
        elif report.skipped and self.outcome == "passed":
            # An expected failure is reported as skipped, too.
            self.outcome = "skipped"
            self.reason = getattr(report, "wasxfail", report.longreprtext)
        if report.when == "teardown":
            self.write(
                "done",
                test=report.nodeid,
                outcome=self.outcome,
                reason=self.reason,
                seconds=round(time.monotonic() - self.began, 3),
            )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Any:
        """Report that the summary has been printed."""
        yield
        session.config.get_terminal_writer().flush()  # MPI_Abort flushes nothing
        self.status = int(exitstatus)
        self.write("end")

    def pytest_internalerror(self, excrepr: Any) -> None:
        """Report an error in pytest or in a plugin."""
        self.write("failed", test="pytest", text=str(excrepr))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """End a failed job.

        The other ranks may be waiting for this one. mpi4py would end the job, too, but
        only at the end of the interpreter, after other exit handlers that may wait.
        """
        self.file.close()
        if self.status != 0 and self.ranks is not None and self.ranks > 1:
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(self.status)

"""Run the tests: the marked ones under mpirun with 1, 2, 3 and 4 ranks, the others once.

    python tests/support/launch.py [-n RANKS] [--short | --rest] [--jobs N] [--timeout S]
        [--job-timeout S] [pytest arguments]

With --short (`make test`), and if nothing else chooses tests, it leaves out what is marked
`thorough`, and runs on 3 ranks only what is not marked `sizes`; with --rest it runs the others.
The tests without MPI run in some processes at once, as many as --jobs says, each of which takes the
next file when it has ended one: they mostly wait for jobs that they have started.

An exit code proves nothing: a job can lose a rank or skip every test and still exit
with 0. So every rank reports each test that it finishes (launch_report.py), and those
reports are compared with what was collected beforehand.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import launch_progress
import launch_record
import mpirun
import patience

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
SIZES = (1, 2, 3, 4)
SIZES_OF_PARTS = (2, 3)
CORES = 2  # of the machine that estimates are for

# What pytest-mpi says of a test that it skips outside of mpirun.
NEEDS_MPI = "need --with-mpi"

# Options of pytest whose value is an argument of its own, and no path.
OPTIONS_WITH_VALUE = {"-k", "-m", "-p", "-o", "-W", "-r", "--deselect"}


# Of this launcher, in whatever thread.
_running: list["subprocess.Popen[str]"] = []


@dataclass
class RankReport:
    """What one rank wrote about its tests."""

    size: int = -1
    tests: dict[str, list[int]] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    files: dict[str, str] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)
    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    running: str | None = None
    ended: bool = False

    @classmethod
    def read(cls, path: Path) -> "RankReport":
        """Read a report; if the rank was killed, as far as it got."""
        report = cls()
        if not path.exists():
            return report
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                break  # killed while writing it
            match event:
                case {"event": "start", "size": size}:
                    report.size = size
                case {"event": "collected", "tests": tests, "alone": alone, "files": files}:
                    report.tests, report.alone, report.files = tests, set(alone), files
                case {"event": "claimed", "tests": tests}:
                    report.claimed.update(tests)
                case {"event": "running", "test": test}:
                    report.running = test
                case {"event": "failed", "test": test, "text": text}:
                    report.failures[test] = report.failures.get(test, "") + text + "\n"
                case {"event": "done", "test": test, "outcome": outcome, "reason": reason}:
                    report.outcomes[test] = outcome
                    report.seconds[test] = event.get("seconds", 0.0)  # not of torch_suite_rank.py
                    report.reasons[test] = reason
                    report.running = None
                case {"event": "end"}:
                    report.ended = True
        return report


@dataclass
class Totals:
    """Tests counted over runs, each test once a run."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __iadd__(self, other: "Totals") -> "Totals":
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        return self

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def say(text: str) -> None:
    """Print at once: the output of the ranks goes to the same place."""
    print(text, flush=True)


def some(names: list[str]) -> str:
    """List the first names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the command line into the launcher's part and pytest's."""

    def sizes(text: str) -> tuple[int, ...]:
        values = tuple(int(part) for part in text.split(","))
        if min(values) < 1:
            raise ValueError
        return values

    parser = argparse.ArgumentParser(
        description="Run the tests under mpirun, and those without MPI in plain pytest.",
        epilog="Everything else goes to pytest, e.g. tests/project/test_launch.py -k hang",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n",
        dest="sizes",
        type=sizes,
        metavar="RANKS",
        help="numbers of ranks, default 1,2,3,4, of a part 2,3",
    )
    for part, text in (("short", "what matters on 2 and 3 ranks"), ("rest", "what --short leaves")):
        parser.add_argument(
            f"--{part}",
            dest="part",
            action="store_const",
            const=part,
            help=f"{text}, unless tests are chosen otherwise",
        )
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(len(os.sched_getaffinity(0)), 3) + 1,
        metavar="N",
        help="processes at once without MPI, by default one more than cores, and at most 4",
    )
    parser.add_argument(
        "--measure", action="store_true", help="write what tests took, for estimates"
    )
    parser.add_argument(
        "--timeout", type=float, default=120, help="seconds for one test, default 120"
    )
    parser.add_argument(
        "--job-timeout", type=float, default=2400, help="seconds for one mpirun, default 2400"
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="keep the counts there, see launch_record.py"
    )
    options, others = parser.parse_known_args(argv)

    # pytest runs in tests/support/, where the source folder mpiddp/ does not hide the package.
    arguments, given = [], False
    for previous, argument in zip(["", *others], others, strict=False):
        path, separator, name = argument.partition("::")
        if argument.startswith("-") or previous in OPTIONS_WITH_VALUE or not Path(path).exists():
            arguments.append(argument)
        else:
            arguments.append(f"{Path(path).resolve()}{separator}{name}")
            given = True
    if given or options.sizes or {"-k", "-m", "--deselect"} & set(others):
        options.part = None
    options.what = " ".join([*([f"--{options.part}"] if options.part else []), *others])
    return options, arguments if given else [*arguments, str(TESTS)]


def kill_ranks(directory: Path) -> None:
    """Kill what is left of a job: its processes have the report directory as an argument."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(directory) in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def run(
    command: list[str], directory: Path, timeout: float, output: int | None = None
) -> tuple[int | None, str]:
    """Run a command and everything it starts, with a time limit.

    Returns:
        The exit status, None after the time limit, and what was printed if `output` is
        subprocess.PIPE.
    """
    process = subprocess.Popen(
        command,
        cwd=SUPPORT,
        env={**mpirun.ENVIRONMENT, **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        text=True,
        start_new_session=True,  # ^C comes to the launcher alone, which ends the job
    )
    _running.append(process)
    began, limit = time.monotonic(), 0.0
    try:
        while True:
            limit = max(limit, patience.enough(timeout))  # as busy as the machine has been
            left = began + limit - time.monotonic()
            try:
                printed, _ = process.communicate(timeout=max(min(left, 60), 0))
            except subprocess.TimeoutExpired:
                if left <= 60:
                    return None, ""
            else:
                return process.returncode, printed or ""
    finally:
        _running.remove(process)
        # mpirun ends its ranks, and pytest what its tests have started, if they can.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
        kill_ranks(directory)  # mpirun itself may have been killed


def pytest_command(options: argparse.Namespace, directory: Path) -> list[str]:
    """Return the part of the command that every run of pytest has."""
    return [
        *("-m", "pytest", "-c", str(TESTS.parent / "pyproject.toml")),
        *("-p", "launch_report", f"--launch-report={directory}"),
        *([f"--launch-part={options.part}"] if options.part else []),
        f"--timeout={options.timeout:g}",
        # Some mpirun give their ranks a terminal, others a pipe.
        f"--color={'yes' if sys.stdout.isatty() else 'no'}",
    ]


def collect(options: argparse.Namespace, arguments: list[str]) -> RankReport:
    """Return a report with all tests that are to run."""
    with tempfile.TemporaryDirectory(prefix="mpiddp-collect-") as name:
        directory = Path(name)
        command = [sys.executable, *pytest_command(options, directory), "--collect-only", "-q"]
        status, printed = run(
            [*command, *arguments], directory, options.job_timeout, subprocess.PIPE
        )
        report = RankReport.read(directory / "rank-0.jsonl")
    if status != 0 or not report.tests:
        say(printed)
        if status is None:
            say(f"Collecting took longer than {options.job_timeout:g} s.")
        say("No tests were run: pytest could not collect them.")
        say(str(Totals(failed=1)))
        sys.exit(1)
    return report


def judge(
    expected: set[str], reports: list[RankReport], size: int, status: int | None
) -> tuple[Totals, list[str]]:
    """Count the tests of one run, and say what is wrong apart from tests that failed.

    Args:
        expected: the tests that every rank was to run.
        reports: one for each rank.
        size: the ranks of the job, 0 without MPI.
        status: the exit status of the job, None when it was ended by the time limit.
    """
    totals, problems, missing = Totals(), [], []
    for rank, report in enumerate(reports):
        if report.size == -1:
            problems.append(f"rank {rank} did not start its tests")
        elif report.size != size:
            problems.append(f"rank {rank} is in a world of {report.size} ranks")
        if report.running is not None:
            problems.append(f"rank {rank} did not finish {report.running}")
        if others := (report.outcomes.keys() | report.failures.keys()) - expected:
            problems.append(f"rank {rank} ran or failed at {', '.join(sorted(others))}")
    for test in sorted(expected):
        outcomes = [report.outcomes.get(test) for report in reports]
        if any(test in report.failures for report in reports):
            totals.failed += 1
        elif None in outcomes:
            missing.append(test)
        elif len(set(outcomes)) > 1:
            totals.failed += 1
            skipped = [rank for rank, outcome in enumerate(outcomes) if outcome == "skipped"]
            reason = reports[skipped[0]].reasons[test]
            problems.append(f"{test} was skipped on ranks {skipped} only: {reason}")
        elif outcomes[0] == "passed":
            totals.passed += 1
        else:
            totals.skipped += 1
    if missing:
        problems.append(
            f"{len(missing)} of {len(expected)} tests did not run to the end: {some(missing)}"
        )
    if misread := [test for test in expected if NEEDS_MPI in reports[0].reasons.get(test, "")]:
        problems.append(f"pytest-mpi takes tests for marked that are not: {some(misread)}")
    if size > 0 and totals.skipped == len(expected):
        problems.append("every test was skipped, nothing was tested")
    if status is None:
        problems.append("the time limit of the job was reached")
    elif status != 0 and totals.failed == 0:
        problems.append(f"the job ended with exit status {status}")
    if problems and totals.failed == 0:
        totals.failed = 1
    return totals, problems


def show_failures(reports: list[RankReport], directory: Path) -> None:
    """Print what the ranks said about failures, unless rank 0 has said it already."""
    shown = set(reports[0].failures) if reports[0].ended else set()
    # When some rank failed, the others stopped because of it and have nothing to add.
    some_failed = any(report.failures for report in reports)
    for rank, report in enumerate(reports):
        failures = report.failures.keys() - shown
        if not failures and (some_failed or report.ended):
            continue
        output = directory / f"rank-{rank}.out"
        if output.exists():
            say(f"--- output of rank {rank}")
            say(output.read_text(encoding="utf-8", errors="replace"))
        if not report.ended:  # its output has no summary
            for test in sorted(failures):
                say(f"--- rank {rank} failed: {test}\n{report.failures[test]}")
        shown |= failures


def run_tests(
    expected: set[str],
    size: int,
    options: argparse.Namespace,
    arguments: list[str],
    later: float = 0.0,
    claims: Path | None = None,
) -> Totals:
    """Run the expected tests on `size` ranks, in plain pytest if it is 0.

    `later` is how many seconds the runs after this one take. With `claims`, a folder, others run
    beside this one: the first to claim a file there has it, all that are claimed are taken from
    `expected`, and what the run prints is shown when it has ended.
    """
    with tempfile.TemporaryDirectory(prefix="mpiddp-tests-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        command = [*pytest_command(options, directory), f"--launch-ranks={size}"]
        if size == 0:
            command = [sys.executable, *command, "--timeout-method=signal", *arguments]
        else:
            launched = [mpirun.find(), "-n", str(size), sys.executable, "-m", "mpi4py"]
            # A signal does not reach a thread that waits inside MPI. Ranks would race for
            # pytest's cache.
            extra = ["--with-mpi", "--timeout-method=thread", "-p", "no:cacheprovider"]
            # After a failure on some ranks only, the ranks are no longer in the same test.
            stop = ["-x"] if size > 1 else []
            command = [*launched, *command, *extra, *stop, *arguments]
        title = f"{size} rank{'s' if size > 1 else ''}" if size else "without MPI"
        say(f"=== {title}: {launch_progress.shown(command)}")
        start = time.monotonic()
        if claims is None:
            with launch_progress.Progress(directory / "rank-0.jsonl", expected, size, later):
                status, _ = run(command, directory, options.job_timeout)
        else:
            # For Progress, which still counts these tests when the directory is gone.
            report = claims / directory.name
            report.touch()
            (directory / "rank-0.jsonl").hardlink_to(report)
            status, printed = run(command, directory, options.job_timeout, subprocess.PIPE)
            say(printed)
        seconds = time.monotonic() - start
        reports = [
            RankReport.read(directory / f"rank-{rank}.jsonl") for rank in range(max(size, 1))
        ]
        due = expected
        if claims is not None:
            due = reports[0].claimed
            expected -= due
        totals, problems = judge(due, reports, size, status)
        if totals.failed:
            show_failures(reports, directory)
        if options.measure:
            # More processes than cores take longer, each of them.
            share = 1.0 if claims is None else min(CORES / options.jobs, 1.0)
            took = {test: share * seconds for test, seconds in reports[0].seconds.items()}
            launch_progress.write_durations(size, took)
    for problem in problems:
        say(f"{title}: {problem}")
    say(f"=== {title}: {totals} in {seconds:.1f} s")
    return totals


def run_at_once(
    expected: set[str],
    collected: RankReport,
    options: argparse.Namespace,
    arguments: list[str],
    later: float,
) -> Totals:
    """Run tests without MPI, their files in several processes at once, and then those alone."""
    alone = expected & collected.alone
    chosen = [argument for argument in arguments if Path(argument).is_absolute()]
    if options.jobs == 1 or any("::" in path for path in chosen):
        return run_tests(expected, 0, options, arguments, later)
    others = [argument for argument in arguments if argument not in chosen]
    # They would race for pytest's cache.
    others += ["-p", "no:cacheprovider"]
    unclaimed = expected - alone
    files = launch_progress.longest_first({test: collected.files[test] for test in unclaimed})
    jobs = min(options.jobs, len(files))
    totals = Totals()
    with (
        tempfile.TemporaryDirectory(prefix="mpiddp-claims-") as name,
        launch_progress.Progress(Path(name), set(unclaimed), 0, later, min(jobs, CORES)),
        ThreadPoolExecutor(max(jobs, 1)) as threads,
    ):
        arguments = [*others, "--launch-alone=without", f"--launch-claims={name}", *files]

        def start(_: int) -> Totals:
            return run_tests(unclaimed, 0, options, arguments, later, Path(name))

        try:
            for found in list(threads.map(start, range(jobs))):
                totals += found
        except BaseException:
            for process in list(_running):
                process.send_signal(signal.SIGINT)
            raise
    if unclaimed:
        say(f"{len(unclaimed)} tests without MPI did not run: {some(sorted(unclaimed))}")
        totals.failed += 1
    if alone:
        arguments = [
            *others,
            "--launch-alone=only",
            *sorted({collected.files[one] for one in alone}),
        ]
        totals += run_tests(alone, 0, options, arguments, later)
    return totals


def main(argv: list[str]) -> int:
    """Run everything; return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options, arguments = parse(argv)
    collected = collect(options, arguments)
    tests = collected.tests
    totals = Totals()

    sizes = options.sizes or (SIZES_OF_PARTS if options.part else SIZES)
    runs = {0: {test for test, (fewest, _) in tests.items() if fewest == 0}}
    for size in sizes:
        runs[size] = {test for test, (fewest, most) in tests.items() if 0 < fewest <= size <= most}
    due = [(size, expected) for size, expected in runs.items() if expected]
    estimate = launch_progress.Estimate()
    seconds = [
        estimate.of(expected, size) / (1 if size else min(options.jobs, CORES))
        for size, expected in due
    ]
    say(f"about {launch_progress.in_words(sum(seconds))} minutes on two cores at rest")
    for index, (size, expected) in enumerate(due):
        later = sum(seconds[index + 1 :])
        if size == 0:
            totals += run_at_once(expected, collected, options, arguments, later)
        else:
            # Not all files: importing those that have nothing for these ranks takes a while.
            files = list(dict.fromkeys(collected.files[test] for test in tests if test in expected))
            if any("::" in argument for argument in arguments):
                files = [argument for argument in arguments if Path(argument).is_absolute()]
            others = [argument for argument in arguments if not Path(argument).is_absolute()]
            totals += run_tests(expected, size, options, [*others, *files], later)

    if too_large := [test for test, (fewest, _) in tests.items() if fewest > max(sizes)]:
        say(f"{len(too_large)} tests need more than {max(sizes)} ranks: {some(too_large)}")
        # No number of ranks ever runs them, unless there are fewer for this time.
        if options.sizes is None and not options.part:
            totals.failed += len(too_large)
    if totals.passed == 0 and totals.failed == 0:
        say("No test was run, or every test was skipped.")
        totals.failed = 1
    say(str(totals))
    if options.record:
        launch_record.record(options.record, options.what, sizes, vars(totals))
    return 1 if totals.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Run torch's own distributed tests on this backend, and with this DistributedDataParallel.

    python tests/parity/torch_suite.py [--quick] [--output DIR] [names of tests, with * and ?]

The tests are those of torch.testing._internal.distributed.distributed_test, from the wheel. What
passes on Gloo must pass on three ranks of MPI as well, with torch's class on our backend
("backend"), and where it wraps a module with our class in place of torch's ("ours"). What is not
asked stands in torch_suite_excluded.txt, with the reason: it is run too, and must not pass. With
--quick only tests of DistributedDataParallel are run, with our class, and no excluded ones.

Ranks stay alive over many tests (torch_suite_rank.py). A test that fails, hangs or kills its rank
ends that job, and the next one goes on behind it. torch starts processes for each test: what fails
with torch's own class in the company of others is run again by itself. Results of Gloo are kept in
the build folder: they are those of a release of torch.
"""

import argparse
import fnmatch
import hashlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import mpirun
import torch
import torch_suite_cpu
from launch import RankReport, Totals, run, say

HERE = Path(__file__).resolve().parent
EXCLUDED = HERE / "torch_suite_excluded.txt"
RANKS = 3
MODES = ("gloo", "ours", "backend")


@dataclass
class Result:
    """How a test went, on all ranks."""

    outcome: str
    why: str = ""
    wraps: bool = False  # it has constructed a DistributedDataParallel
    seconds: float = 0.0


def find_tests() -> dict[str, str]:
    """Return all tests of the suite, each with the source of it and of its helpers."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS), INIT_METHOD="file://")
    torch_suite_cpu.enable_tests()
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    base = DistributedTest._DistTestBase
    found = {}
    for name in sorted(vars(base)):
        if name.startswith("test_") and not hasattr(getattr(base, name), "__unittest_skip__"):
            found[name] = _source(base, name, set())
    return found


def _source(base: type, name: str, seen: set[str]) -> str:
    seen.add(name)
    source = inspect.getsource(inspect.unwrap(getattr(base, name)))
    helpers = [each for each in re.findall(r"self\.(_test\w+)", source) if hasattr(base, each)]
    return source + "".join(_source(base, each, seen) for each in helpers if each not in seen)


def read_excluded() -> dict[tuple[str, str], str]:
    """Return the reasons for what is not asked, by mode and test."""
    excluded = {}
    for line in EXCLUDED.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            mode, test, reason = line.split(maxsplit=2)
            assert mode in MODES, line
            excluded[mode, test] = reason
    return excluded


def run_together(mode: str, tests: list[str], seconds: float) -> dict[str, Result]:
    """Run tests in as few jobs as their failures allow."""
    results: dict[str, Result] = {}
    while left := [test for test in tests if test not in results]:
        results |= run_job(mode, left, seconds)
    return results


def run_job(mode: str, tests: list[str], seconds: float) -> dict[str, Result]:
    """Run tests in one job, up to the first that fails: at least one has a result."""
    results = {}
    with tempfile.TemporaryDirectory(prefix="mpiddp-torch-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        (directory / "tests").write_text("\n".join(tests), encoding="utf-8")
        rank = [sys.executable, str(HERE / "torch_suite_rank.py"), mode, name, str(seconds)]
        command = [mpirun.find(), "-n", str(RANKS), *rank]
        run(command, directory, seconds * (1 + len(tests)), subprocess.PIPE)
        reports = [RankReport.read(directory / f"rank-{rank}.jsonl") for rank in range(RANKS)]
        for test in tests:
            outcomes = {report.outcomes.get(test) for report in reports}
            if outcomes in ({"passed"}, {"skipped"}):
                results[test] = Result(outcomes.pop() or "", **json.loads(reports[0].reasons[test]))
            else:
                results[test] = Result("failed", _failure(test, reports, directory))
                break
    return results


def _failure(test: str, reports: list[RankReport], directory: Path) -> str:
    """Return what the ranks have said, of those that say the same only the first."""
    told: list[str] = []
    for rank, report in enumerate(reports):
        text = report.failures.get(test, "")
        if not text and report.running == test:
            printed = (directory / f"rank-{rank}.out").read_text(errors="replace")
            text = printed[printed.rfind(f"--- {test}") :][-4000:] + "did not end"
        if text and _last_line(text) not in [_last_line(each) for each in told]:
            told.append(f"rank {rank}: {text.strip()}")
    return "\n".join(told) or "some ranks did not run it"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def run_on_gloo(tests: list[str], seconds: float, kept: Path) -> dict[str, Result]:
    """Return the results of tests on Gloo, those that were kept before without running them."""
    parts = [torch.__version__.encode()]
    parts += [(HERE / f"torch_suite_{part}.py").read_bytes() for part in ("rank", "cpu")]
    key = hashlib.sha256(b"".join(parts)).hexdigest()
    results = {}
    if kept.exists():
        data = json.loads(kept.read_text(encoding="utf-8"))
        if data["key"] == key:
            results = {test: Result(**result) for test, result in data["results"].items()}
    results |= run_asked("gloo", [test for test in tests if test not in results], seconds)
    kept.parent.mkdir(parents=True, exist_ok=True)
    data = {"key": key, "results": {test: asdict(result) for test, result in results.items()}}
    kept.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return results


def run_asked(mode: str, tests: list[str], seconds: float) -> dict[str, Result]:
    """Run tests that are to pass; with torch's own class a second time by themselves."""
    results = run_together(mode, tests, seconds)
    if mode != "ours":
        for test, result in results.items():
            if result.outcome == "failed":
                results |= run_job(mode, [test], seconds)
    return results


def show(name: str, cells: list[str]) -> None:
    """Print a line of the table."""
    say("  ".join([f"{name:84}", *(f"{cell:8}" for cell in cells)]).rstrip())


def main() -> int:
    """Run what is asked for; return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # end the ranks too
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="*", default=["*"], help="default: all")
    parser.add_argument("--quick", action="store_true", help="tests of our class only")
    parser.add_argument("--output", type=Path, default=HERE.parents[1] / "build" / "test-torch")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one test")
    options = parser.parse_args()

    sources, excluded, totals = find_tests(), read_excluded(), Totals()
    wrong = [
        f"{test} is excluded and not in the suite" for _, test in excluded if test not in sources
    ]
    chosen = [
        name
        for name, source in sources.items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in options.tests)
        and not (options.quick and "DistributedDataParallel" not in source)
    ]
    asked = [test for test in chosen if not (options.quick and ("gloo", test) in excluded)]
    results = {"gloo": run_on_gloo(asked, options.timeout, options.output / "gloo.json")}
    on_gloo = {test: results["gloo"][test] for test in asked}
    due = [test for test, result in on_gloo.items() if result.outcome == "passed"]
    for test, result in on_gloo.items():
        if result.outcome == "failed" and ("gloo", test) not in excluded:
            wrong.append(f"{test} does not pass on Gloo, and is not excluded:\n{result.why}")
        elif result.outcome == "passed" and ("gloo", test) in excluded:
            wrong.append(f"{test} passes on Gloo, but is excluded")

    modes = ("ours",) if options.quick else ("ours", "backend")
    for mode in modes:
        tests = [test for test in due if mode == "backend" or on_gloo[test].wraps]
        refused = [test for test in tests if (mode, test) in excluded]
        tests = [test for test in tests if test not in refused]
        say(f"=== {mode}: {len(tests)} tests of torch on {RANKS} ranks")
        results[mode] = run_asked(mode, tests, options.timeout)
        for test, result in results[mode].items():
            if result.outcome == "failed":
                wrong.append(f"{test} ({mode}):\n{result.why}")
        totals += Totals(sum(each.outcome == "passed" for each in results[mode].values()))
        totals += Totals(skipped=len(refused))
        for test in [] if options.quick else refused:
            if run_job(mode, [test], options.timeout)[test].outcome == "passed":
                wrong.append(f"{test} ({mode}) passes, but is excluded")

    show(f"torch {torch.__version__}, {RANKS} ranks", ["Gloo", *modes])
    for test in asked:
        cells = [
            results[mode][test].outcome
            if test in results[mode]
            else "excluded"
            if (mode, test) in excluded
            else "-"
            for mode in ("gloo", *modes)
        ]
        if cells[0] != "skipped":
            show(test, cells)
    say("\nExcluded (tests/parity/torch_suite_excluded.txt):")
    for (mode, test), reason in excluded.items():
        if test in chosen and mode in ("gloo", *modes):
            show(test, [mode, reason])
    for text in wrong:
        say(f"\n{text}")
    totals.failed = len(wrong)
    if not due:
        say("No test was run.")
        totals.failed += 1
    say(f"\n{totals}")
    return 1 if totals.failed else 0


if __name__ == "__main__":
    sys.exit(main())

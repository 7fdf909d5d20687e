"""The launcher refuses what an exit code would let through.

Each test writes a small test file and has the launcher run it, on the MPI of this
environment.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import launch
import launch_progress
import pytest
from launch_report import in_share

HEADER = """\
import os, sys, time
import pytest
from mpi4py import MPI

comm = MPI.COMM_WORLD
mpi = pytest.mark.mpi

"""


class Launched:
    """What the launcher printed and returned for a test file."""

    def __init__(self, folder: Path, source: str, *options: str) -> None:
        file = folder / "test_generated.py"
        file.write_text(HEADER + source)
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, launch.__file__, *options, str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        self.seconds = time.monotonic() - start
        self.output = done.stdout
        self.status = done.returncode
        self.closing_line = done.stdout.splitlines()[-1]
        print(self.output)  # pytest shows it when a test fails


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # dead, but nobody has asked for its exit status


@pytest.mark.once
def test_runs_each_test_where_it_belongs(tmp_path):
    source = """
def test_without_mpi():
    assert "OMPI_COMM_WORLD_SIZE" not in os.environ and "PMI_SIZE" not in os.environ

@mpi
def test_any_size():
    assert comm.allreduce(1) == comm.size

@mpi(min_size=2)
def test_two(tmp_path):
    assert comm.size == 2
    assert len(set(comm.allgather(str(tmp_path)))) == 2

@mpi
@pytest.mark.skipif(comm.size == 1, reason="one rank")
def test_skipped_alone():
    pass

@mpi
@pytest.mark.xfail(raises=ValueError, reason="the launcher is to count it as skipped")
def test_expected_failure():
    raise ValueError
"""
    launched = Launched(tmp_path, source, "-n", "1,2")
    # without MPI 1; one rank 1 and two skipped; two ranks 3 and one skipped
    assert launched.closing_line == "5 passed, 0 failed, 3 skipped"
    assert launched.status == 0


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.once), 1])
def test_failure_on_one_rank_ends_the_job(tmp_path, rank):
    source = f"""
@mpi(min_size=2)
def test_fails():
    assert comm.rank != {rank}, "said by the rank that fails"
    comm.barrier()

@mpi(min_size=2)
def test_after():
    comm.barrier()
"""
    launched = Launched(tmp_path, source, "-n", "2", "--timeout", "60")
    assert launched.seconds < 40
    assert "AssertionError: said by the rank that fails" in launched.output
    assert "1 of 2 tests did not run to the end" in launched.output
    assert launched.closing_line == "0 passed, 1 failed, 0 skipped"
    assert launched.status == 1


@pytest.mark.thorough
def test_hang_of_one_rank_is_ended_by_the_time_limit_of_a_test(tmp_path):
    source = """
@mpi(min_size=2)
def test_waits_for_ever():
    if comm.rank == 1:
        comm.recv(source=0)
    comm.barrier()
"""
    launched = Launched(tmp_path, source, "-n", "2", "--timeout", "4")
    assert launched.seconds < 40
    assert "did not finish" in launched.output
    assert "Timeout" in launched.output
    assert "test_waits_for_ever" in launched.output
    assert launched.closing_line == "0 passed, 1 failed, 0 skipped"
    assert launched.status == 1


@pytest.mark.slow
def test_hang_is_ended_by_the_time_limit_of_the_job(tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    source = f"""
@mpi(min_size=2)
def test_waits_for_ever():
    open({str(pids)!r} + "/" + str(os.getpid()), "w").close()
    while True:
        time.sleep(1)
"""
    launched = Launched(tmp_path, source, "-n", "2", "--timeout", "90", "--job-timeout", "8")
    assert launched.seconds < 40
    assert "the time limit of the job was reached" in launched.output
    assert launched.closing_line == "0 passed, 1 failed, 0 skipped"
    assert launched.status == 1
    ranks = [int(path.name) for path in pids.iterdir()]
    assert len(ranks) == 2
    deadline = time.monotonic() + 5
    while any(map(is_running, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.thorough
@pytest.mark.once
def test_skipping_everything_is_refused(tmp_path):
    source = """
@mpi
def test_skips():
    pytest.skip("the launcher is to refuse a run in which all is skipped")
"""
    launched = Launched(tmp_path, source, "-n", "1")
    assert "every test was skipped" in launched.output
    assert launched.status == 1


@pytest.mark.slow
@pytest.mark.once
def test_test_that_pytest_mpi_takes_for_marked_is_refused(tmp_path):
    source = """
@pytest.mark.parametrize("way", ["mpi"])
def test_plain(way):
    pass

def test_other():
    pass
"""
    launched = Launched(tmp_path, source)
    assert "pytest-mpi takes tests for marked that are not" in launched.output
    assert launched.status == 1


@pytest.mark.slow
@pytest.mark.once
def test_exit_in_the_middle_is_refused(tmp_path):
    source = """
@mpi
def test_leaves():
    MPI.Finalize()
    os._exit(0)

@mpi
def test_never_reached():
    pass
"""
    launched = Launched(tmp_path, source, "-n", "1")
    assert "did not finish" in launched.output
    assert "2 of 2 tests did not run to the end" in launched.output
    assert launched.status == 1


@pytest.mark.slow
@pytest.mark.once
def test_number_of_ranks_that_is_never_started_is_refused(tmp_path):
    source = """
@mpi(min_size=5)
def test_five():
    pass
"""
    launched = Launched(tmp_path, source)
    assert "1 tests need more than 4 ranks" in launched.output
    assert launched.closing_line == "0 passed, 1 failed, 0 skipped"
    assert launched.status == 1


@pytest.mark.thorough
@pytest.mark.once
def test_file_that_cannot_be_collected_is_refused(tmp_path):
    launched = Launched(tmp_path, "import no_such_module\n")
    assert "no_such_module" in launched.output
    assert launched.closing_line == "0 passed, 1 failed, 0 skipped"
    assert launched.status == 1


def report(size: int, **outcomes: str) -> launch.RankReport:
    return launch.RankReport(
        size=size,
        outcomes=outcomes,
        reasons=dict.fromkeys(outcomes, "a reason"),
        failures={test: "why" for test, outcome in outcomes.items() if outcome == "failed"},
        ended=True,
    )


@pytest.mark.once
class TestJudge:
    def test_all_passed(self):
        reports = [report(2, a="passed", b="skipped"), report(2, a="passed", b="skipped")]
        totals, problems = launch.judge({"a", "b"}, reports, 2, 0)
        assert str(totals) == "1 passed, 0 failed, 1 skipped"
        assert problems == []

    def test_failed_on_one_rank(self):
        reports = [report(2, a="passed"), report(2, a="failed")]
        totals, problems = launch.judge({"a"}, reports, 2, 1)
        assert str(totals) == "0 passed, 1 failed, 0 skipped"
        assert problems == []

    @pytest.mark.parametrize(
        ("reports", "status", "problem"),
        [
            ([report(2, a="passed"), report(2)], 0, "1 of 1 tests did not run"),
            ([report(2, a="passed"), launch.RankReport()], 0, "rank 1 did not start"),
            ([report(1, a="passed"), report(1, a="passed")], 0, "world of 1 ranks"),
            ([report(2, a="passed"), report(2, a="skipped")], 0, "skipped on ranks [1] only"),
            ([report(2, a="passed", b="passed"), report(2, a="passed")], 0, "rank 0 ran"),
            ([report(2, a="skipped"), report(2, a="skipped")], 0, "every test was skipped"),
            ([report(2, a="passed"), report(2, a="passed")], 139, "exit status 139"),
            ([report(2, a="passed"), report(2, a="passed")], None, "time limit"),
        ],
    )
    def test_refused(self, reports, status, problem):
        totals, problems = launch.judge({"a"}, reports, 2, status)
        assert totals.failed == 1
        assert any(problem in text for text in problems)


@pytest.mark.once
class TestParse:
    def test_paths_are_made_absolute(self, monkeypatch):
        monkeypatch.chdir(launch.TESTS.parent)
        options, arguments = launch.parse(
            ["-n", "1,3", "tests/project/test_launch.py::TestParse", "-x"]
        )
        assert options.sizes == (1, 3)
        assert arguments == [f"{Path(__file__).resolve()}::TestParse", "-x"]

    def test_values_of_options_are_no_paths(self, monkeypatch):
        monkeypatch.chdir(launch.TESTS.parent)
        _, arguments = launch.parse(["-k", "tests", "--deselect", "tests/project/test_launch.py"])
        assert arguments == [
            *("-k", "tests", "--deselect", "tests/project/test_launch.py"),
            str(launch.TESTS),
        ]

    @pytest.mark.parametrize("sizes", ["0", "two", ""])
    def test_bad_sizes(self, sizes, capsys):
        with pytest.raises(SystemExit):
            launch.parse(["-n", sizes])
        assert "-n" in capsys.readouterr().err

    def test_short_unless_something_else_chooses(self):
        assert launch.parse(["--short"])[0].part == "short"
        assert launch.parse(["--short", "-x"])[0].part == "short"
        for chosen in (["-n", "2"], ["-k", "x"], ["-m", "mpi"], [__file__]):
            assert launch.parse(["--short", *chosen])[0].part is None


@pytest.mark.thorough
@pytest.mark.once
def test_short_and_the_rest(tmp_path):
    file = tmp_path / "test_generated.py"
    file.write_text(
        HEADER
        + """
@pytest.mark.thorough
def test_thorough():
    pass

@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("number", range(5))
def test_some(number):
    pass

@mpi
@pytest.mark.sizes
def test_ranks():
    pass

@mpi
def test_largest():
    pass

@mpi
@pytest.mark.simulated_gpu
def test_gpu():
    pass
"""
    )
    found = {}
    for part in ("short", "rest"):
        options, _ = launch.parse([f"--{part}"])
        start = [sys.executable, *launch.pytest_command(options, tmp_path), "--collect-only", file]
        subprocess.run(start, cwd=launch.SUPPORT, check=True, timeout=100)
        tests = launch.RankReport.read(tmp_path / "rank-0.jsonl").tests
        found[part] = {test.partition("::")[2]: sizes for test, sizes in tests.items()}
    assert found["short"] == {
        "test_some[0]": [0, sys.maxsize],
        "test_some[2]": [0, sys.maxsize],
        "test_ranks": [1, sys.maxsize],
        "test_largest": [3, sys.maxsize],
        "test_gpu": [1, 2],
    }
    others = ["test_thorough", *(f"test_some[{number}]" for number in (1, 3, 4))]
    assert found["rest"] == {test: [0, sys.maxsize] for test in others}


def test_shares():
    """Each test is in one of them."""
    tests = [f"tests/test_{number}.py::test" for number in range(600)]
    shares = [{test for test in tests if in_share(test, f"{k}/3")} for k in (1, 2, 3)]
    assert set.union(*shares) == {*tests}
    assert sum(map(len, shares)) == len(tests)
    assert min(map(len, shares)) > 150


@pytest.mark.once
class TestProgress:
    @pytest.fixture(autouse=True)
    def _durations(self, tmp_path, monkeypatch):
        monkeypatch.setattr(launch_progress, "DURATIONS", tmp_path / "durations.json")
        launch_progress.write_durations(
            2, {"a/test_x.py::one": 10.0, "a/test_x.py::two": 30.0, "test_y.py::one": 60.0}
        )

    def test_estimate_is_by_file_wherever_it_lies(self):
        estimate = launch_progress.Estimate()
        assert estimate.of(["b/test_x.py::one", "test_y.py::one"], 2) == 20.0 + 60.0
        assert estimate.of(["test_new.py::one"], 2) == launch_progress.UNKNOWN

    def test_line_says_what_runs_and_how_much_is_left(self, tmp_path):
        report = tmp_path / "rank-0.jsonl"
        tests = {"test_x.py::one", "test_x.py::two", "test_y.py::one"}
        progress = launch_progress.Progress(report, tests, 2, later=100.0)
        assert progress.line() == "[2 ranks: 0 of 3 tests, about 3:20 left in all; now starting]"
        report.write_text(
            '{"event": "done", "test": "test_x.py::one"}\n'
            '{"event": "running", "test": "test_y.py::one"}\n{"event": "do'
        )
        expected = "[2 ranks: 1 of 3 tests, about 3:00 left in all; now test_y.py::one]"
        assert progress.line() == expected

    def test_processes_beside_each_other_share_what_is_left(self, tmp_path):
        for name, test in ("a", "test_x.py::one"), ("b", "test_x.py::two"):
            event = {"event": "done" if name == "a" else "running", "test": test}
            (tmp_path / f"mpiddp-{name}").write_text(json.dumps(event) + "\n")
        tests = {"test_x.py::one", "test_x.py::two", "test_y.py::one"}
        progress = launch_progress.Progress(tmp_path, tests, 2, later=10.0, jobs=2)
        expected = "[2 ranks: 1 of 3 tests, about 0:50 left in all; now test_x.py::two]"
        assert progress.line() == expected

    def test_a_machine_that_is_slower_needs_longer(self, tmp_path, monkeypatch):
        report = tmp_path / "rank-0.jsonl"
        report.write_text('{"event": "done", "test": "test_y.py::one"}\n')
        progress = launch_progress.Progress(report, {"test_x.py::one", "test_y.py::one"}, 2, 0.0)
        now = time.monotonic() + 120.0
        monkeypatch.setattr(time, "monotonic", lambda: now)
        assert "about 0:40 left" in progress.line()  # twice what it was


@pytest.mark.thorough
@pytest.mark.once
def test_files_run_beside_each_other(tmp_path: Path) -> None:
    """Except what is marked alone. Each test notes when it ran."""
    source = """
import pathlib, time, pytest

def note(name):
    began = time.monotonic()
    time.sleep(2)
    (pathlib.Path(__file__).parent / name).write_text(f"{began} {time.monotonic()}")

def test_plain_NAME():
    note("plain-NAME")

@pytest.mark.alone
def test_alone_NAME():
    note("alone-NAME")
"""
    files = [tmp_path / f"test_generated_{name}.py" for name in "ab"]
    for file, name in zip(files, "ab", strict=True):
        file.write_text(source.replace("NAME", name))
    done = subprocess.run(
        [sys.executable, launch.__file__, "--jobs", "2", *map(str, files)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert done.stdout.endswith("4 passed, 0 failed, 0 skipped\n")
    times = {
        path.name: [float(text) for text in path.read_text().split()]
        for path in tmp_path.glob("*-?")
    }
    plain = [times[f"plain-{name}"] for name in "ab"]
    assert plain[0][0] < plain[1][1]
    assert plain[1][0] < plain[0][1]
    others = sorted([*plain, *(times[f"alone-{name}"] for name in "ab")])
    assert others[2][0] >= max(plain[0][1], plain[1][1])
    assert others[3][0] >= others[2][1]

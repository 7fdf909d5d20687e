"""While tests run, say what is running and how much is left, from measured durations.

`launch_durations.json` holds seconds by number of ranks and test file, from a machine of two cores
at rest: `python tests/support/launch.py --measure` writes it. On another or a busy machine, the
tests that have run tell how much longer the others take.
"""

import json
import shlex
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

DURATIONS = Path(__file__).with_name("launch_durations.json")
# Seconds between two lines.
PERIOD = 20.0
# What a test takes that nobody has measured.
UNKNOWN = 0.5

_writing = threading.Lock()


def file_of(test: str) -> str:
    """Return the file of a test without its folder: files may move."""
    return test.partition("::")[0].rpartition("/")[2]


def read_durations() -> dict[str, dict[str, list[float]]]:
    """Return seconds and number of tests, by number of ranks and by file."""
    if not DURATIONS.exists():
        return {}
    found: dict[str, dict[str, list[float]]] = json.loads(DURATIONS.read_text())
    return found


def write_durations(size: int, seconds: Mapping[str, float]) -> None:
    """Record what each test of a run took. Runs beside each other may do so at once."""
    counts = Counter(file_of(test) for test in seconds)
    with _writing:
        durations = read_durations()
        totals: dict[str, list[float]] = durations.setdefault(str(size), {})
        for file, count in counts.items():
            took = sum(each for test, each in seconds.items() if file_of(test) == file)
            totals[file] = [round(took, 1), count]
        ordered = {key: dict(sorted(durations[key].items())) for key in sorted(durations)}
        DURATIONS.write_text(json.dumps(ordered, indent=1) + "\n")


class Estimate:
    """How long tests take."""

    def __init__(self) -> None:
        self._durations = read_durations()

    def of(self, tests: Iterable[str], size: int) -> float:
        """Return the seconds that `tests` take with a number of ranks, 0 for without MPI."""
        known = self._durations.get(str(size), {})
        total = 0.0
        for file, count in Counter(map(file_of, tests)).items():
            seconds, measured = known.get(file, [UNKNOWN, 1])
            total += seconds / measured * count
        return total


def longest_first(tests: Mapping[str, str]) -> list[str]:
    """Return the files of tests, given with their files, those first that take longest."""
    estimate = Estimate()
    files: dict[str, set[str]] = {}
    for test, file in tests.items():
        files.setdefault(file, set()).add(test)
    seconds = {file: estimate.of(of_it, 0) for file, of_it in files.items()}
    return sorted(files, key=lambda file: (-seconds[file], file))


def shown(command: list[str]) -> str:
    """Return a command, of its many files but the first."""
    files = [argument for argument in command if argument.endswith(".py")]
    left_out = set(files[1:]) if len(files) > 3 else set()
    text = shlex.join(argument for argument in command if argument not in left_out)
    return f"{text} and {len(left_out)} more" if left_out else text


def in_words(seconds: float) -> str:
    """Return a duration such as "3:05"."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    return f"{minutes}:{rest:02}"


class Progress:
    """A thread that prints a line now and then while one run goes on.

    Args:
        report: of rank 0, or a folder with those of processes beside each other.
        expected: the tests of this run.
        size: its number of ranks.
        later: seconds that the runs after it take.
        jobs: how many processes there are.
    """

    def __init__(
        self, report: Path, expected: set[str], size: int, later: float, jobs: int = 1
    ) -> None:
        self._report = report
        self._jobs = max(jobs, 1)
        self._expected = expected
        self._size = size
        self._later = later
        self._estimate = Estimate()
        self._began = time.monotonic()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def line(self) -> str:
        """Return what is running and how much is left."""
        ended, running = self._events()
        left = self._estimate.of(self._expected - ended, self._size) / self._jobs
        due = self._estimate.of(ended, self._size) / self._jobs
        elapsed = time.monotonic() - self._began
        # Before enough has run to judge this machine by, it is taken for the measured one.
        factor = min(max(elapsed / due, 0.5), 10.0) if due > PERIOD else 1.0
        runs = f"{self._size} ranks" if self._size else "without MPI"
        if self._size == 1:
            runs = "1 rank"
        return (
            f"[{runs}: {len(ended)} of {len(self._expected)} tests, "
            f"about {in_words(factor * (left + self._later))} left in all; "
            f"now {running or 'starting'}]"
        )

    def _events(self) -> tuple[set[str], str]:
        ended: set[str] = set()
        running: list[str] = []
        reports = self._report.glob("mpiddp-*") if self._report.is_dir() else [self._report]
        for report in reports:
            now = ""
            try:
                lines = report.read_text(encoding="utf-8").splitlines()
            except OSError:
                continue
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    break  # it is being written
                if event["event"] == "done":
                    ended.add(event["test"])
                    now = ""
                elif event["event"] == "running":
                    now = event["test"]
            running += [now] if now else []
        return ended & self._expected, " and ".join(running)

    def _run(self) -> None:
        while not self._ending.wait(PERIOD):
            print(f"\n{self.line()}", flush=True)

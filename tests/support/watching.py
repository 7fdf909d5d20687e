"""Start a job, and watch it from outside as `python -m mpiddp.top` does."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mpirun
import patience

from mpiddp.top.jobs import Job, Row, Watcher

__all__ = ["SCRIPT", "Watched", "watched"]

SCRIPT = Path(__file__).parent / "scripts" / "watched.py"


@dataclass
class Watched:
    """A job that runs.

    Attributes:
        word: in its command line, and in no other one's.
        folder: of its files.
        watcher: looks at its ranks only.
        process: of mpirun.
    """

    word: str
    folder: Path
    watcher: Watcher
    process: "subprocess.Popen[bytes]"

    def until(self, seen: Callable[[Job], object], seconds: float = 40) -> Job:
        """Look until a job is there that fulfils a condition, and return it."""
        end = time.monotonic() + patience.enough(seconds)
        jobs: list[Job] = []
        while time.monotonic() < end:
            jobs = self.watcher.look()
            if len(jobs) == 1 and seen(jobs[0]):
                return jobs[0]
            time.sleep(0.1)
        raise TimeoutError(f"not seen: {jobs}")

    def until_none(self, seconds: float = 20) -> None:
        """Look until there is no rank of the job any more."""
        end = time.monotonic() + patience.enough(seconds)
        while jobs := self.watcher.look():
            assert time.monotonic() < end, jobs
            time.sleep(0.1)

    def stop(self) -> None:
        """Let the job end by itself."""
        (self.folder / "stop").touch()


def rows_with_steps(job: Job, ranks: int, steps: int) -> bool:
    """Whether all ranks are there, and have made so many steps."""
    return len(job.rows) == ranks and all((row.steps or 0) >= steps for row in job.rows)


def steps_of(row: Row) -> int:
    """Return the steps of a rank that has a wrapped module."""
    assert row.steps is not None
    return row.steps


@contextlib.contextmanager
def watched(folder: Path, ranks: int, kind: str, steps: int = -1) -> Iterator[Watched]:
    """Run scripts/watched.py on so many ranks, and kill what is left of it at the end."""
    word = f"watched-{time.monotonic_ns()}"
    arguments = [SCRIPT, word, folder, kind, *([str(steps)] if steps >= 0 else [])]
    watcher = Watcher(word)
    try:
        with mpirun.started(ranks, arguments) as process:
            yield Watched(word, folder, watcher, process)
    finally:
        watcher.close()

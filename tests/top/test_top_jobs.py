"""Jobs that are watched from outside: who is slow, who hangs, and that nobody is stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from watching import Watched, rows_with_steps, steps_of, watched

from mpiddp.top.jobs import Job

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are found in /proc"),
]


def top(*arguments: str) -> str:
    """Return what the command prints into a pipe."""
    command = [sys.executable, "-m", "mpiddp.top", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/")
    print(done.stdout, done.stderr)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def check_slow_rank(job: Job, ranks: int) -> None:
    """The last rank sleeps for most of each step, and the others wait for it in most of them."""
    slow = ranks - 1
    for row in job.rows:
        assert row.module is not None
        assert row.module.name == "Sequential"
        assert row.slowest == slow
        assert row.module.late > row.module.compared / 2
        assert row.exposed is not None
        assert row.waiting is not None
        if row.rank.rank == slow:
            assert row.waiting < 0.3
            assert row.exposed < 0.5
        else:
            assert 0.4 < row.waiting <= 1
            assert 0.4 < row.exposed <= 1


@pytest.mark.thorough(keep=1)
@pytest.mark.smoke
@pytest.mark.essential
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_training(tmp_path: Path, ranks: int) -> None:
    with watched(tmp_path, ranks, "train") as job:
        first = job.until(lambda seen: rows_with_steps(seen, ranks, 60))
        began = time.monotonic()
        check_slow_rank(first, ranks)
        assert [row.rank.rank for row in first.rows] == list(range(ranks))
        assert first.size == ranks
        assert first.command.startswith(f"watched.py {job.word} ")
        check_commands(job, ranks)
        second = job.until(lambda seen: steps_of(seen.rows[0]) >= steps_of(first.rows[0]) + 40)
        per_second = (steps_of(second.rows[0]) - steps_of(first.rows[0])) / (
            time.monotonic() - began
        )
        for before, after in zip(first.rows, second.rows, strict=True):
            assert after.rank.process_id == before.rank.process_id
            assert steps_of(after) > steps_of(before)
            assert after.steps_per_second == pytest.approx(per_second, rel=0.5)
            assert after.operations > before.operations
            assert after.rank.usage.memory > 1 << 24
            assert 0 < after.processor < 8
            assert after.awaited == []
        assert second.still is None
        job.stop()
        job.until_none()
        assert job.process.wait(60) == 0
    # Nobody was stopped, not even for a moment.
    assert [(tmp_path / f"continued-{rank}").read_text() for rank in range(ranks)] == ["0"] * ranks


def check_commands(job: Watched, ranks: int) -> None:
    """What a pipe gets, once."""
    lines = top(job.word).splitlines()
    assert len(lines) == 2 + ranks
    assert f"ranks 0-{ranks - 1} of {ranks}; step " in lines[0]
    assert f"rank {ranks - 1} was the last in " in lines[0]
    assert lines[1].split()[:6] == ["RANK", "STEP", "STEP/S", "WAIT", "LAST", "FOR"]
    cells = [line.split() for line in lines[2:]]
    assert [row[0] for row in cells] == [str(rank) for rank in range(ranks)]
    assert [row[5] for row in cells] == [str(ranks - 1)] * (ranks - 1) + ["-"]

    told = json.loads(top("--json", job.word))
    (found,) = told["jobs"]
    assert found["size"] == ranks
    for rank, row in enumerate(found["ranks"]):
        assert row["rank"] == rank
        assert row["steps"] >= 60
        assert row["slowest_rank"] == ranks - 1
        assert row["problem"] is None
        assert row["modules"][0]["name"] == "Sequential"


@pytest.mark.thorough(keep=1)
@pytest.mark.essential
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_training_that_hangs(tmp_path: Path, ranks: int) -> None:
    slow = ranks - 1
    with watched(tmp_path, ranks, "train", steps=30) as job:
        seen = job.until(lambda seen: seen.still is not None and seen.awaited)
        assert seen.awaited == [slow]
        assert seen.still is not None
        assert seen.still > 1
        for row in seen.rows:
            assert row.steps == 30
            assert row.steps_per_second == 0
            assert row.doing.since is not None
            assert row.doing.since > 1
            if row.rank.rank == slow:
                assert row.doing.words == "in no operation"
                assert row.awaited == []
            else:
                assert row.doing.words.startswith("bucket ")
                assert row.doing.words.endswith(" of backward pass 31 of Sequential")
                assert row.awaited == [slow]
        text = top(job.word)
        assert "step 30, none for " in text
        assert f"; rank {slow} is awaited\n" in text
        # A job that is killed leaves nothing behind.
        for row in seen.rows:
            os.kill(row.rank.process_id, signal.SIGKILL)
        job.until_none()
        assert top(job.word).endswith(": no rank of mpiddp runs here as this user\n")


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_that_hang(tmp_path: Path, ranks: int) -> None:
    """Without a wrapped module there are operations to count."""
    slow = ranks - 1
    with watched(tmp_path, ranks, "collectives", steps=150) as job:
        going = job.until(
            lambda seen: (
                len(seen.rows) == ranks
                and all(
                    20 < row.operations < 250 and row.operations_per_second for row in seen.rows
                )
            )
        )
        # Two in each step of 30 ms and more.
        assert all(0 < (row.operations_per_second or 0) < 70 for row in going.rows)
        assert all(row.module is None and row.steps is None for row in going.rows)
        seen = job.until(lambda seen: seen.awaited and seen.rows[0].operations > 250)
        assert seen.awaited == [slow]
        for row in seen.rows[:-1]:
            assert row.doing.words == "all_reduce(SUM) of float32 (3,)"
            assert row.doing.since is not None
            assert row.doing.since >= 1
            assert row.awaited == [slow]
        later = job.until(lambda seen: seen.rows[0].operations_per_second == 0)
        assert later.rows[0].operations == seen.rows[0].operations
        text = top(job.word)
        assert text.splitlines()[1].split()[:3] == ["RANK", "FOR", "OP/S"]
        assert " s: all_reduce(SUM) of float32 (3,)\n" in text


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("kind", ["torch", "horovod"])
def test_trainings_without_our_wrapper(tmp_path: Path, kind: str) -> None:
    with watched(tmp_path, 2, kind) as job:
        first = job.until(
            lambda seen: len(seen.rows) == 2 and all(row.operations > 20 for row in seen.rows)
        )
        second = job.until(
            lambda seen: all(
                row.operations > before.operations + 20
                for row, before in zip(seen.rows, first.rows, strict=True)
            )
        )
        assert all((row.operations_per_second or 0) > 1 for row in second.rows)
        assert all(row.doing.words for row in second.rows)


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    with watched(tmp_path, 2, "train") as job:
        going = job.until(lambda seen: rows_with_steps(seen, 2, 30))
        os.kill(going.rows[1].rank.process_id, signal.SIGSTOP)
        seen = job.until(lambda seen: seen.awaited)
        assert seen.awaited == [1]
        assert seen.rows[1].doing.words == "is stopped (SIGSTOP, scontrol suspend)"
        os.kill(going.rows[1].rank.process_id, signal.SIGCONT)
        job.until(lambda seen: not seen.awaited and steps_of(seen.rows[1]) > 60)


@pytest.mark.once
def test_ranks_under_the_runner(tmp_path: Path) -> None:
    """They put up two signs: one before they come to their world."""
    import mpirun
    from watching import SCRIPT

    from mpiddp.top.jobs import Watcher

    word = f"watched-{time.monotonic_ns()}"
    watcher = Watcher(word)
    with mpirun.started(2, ["-m", "mpiddp", SCRIPT, word, tmp_path, "train"]) as process:
        job = Watched(word, tmp_path, watcher, process)
        job.until(lambda seen: rows_with_steps(seen, 2, 5))
        job.stop()
        assert process.wait(60) == 0
    watcher.close()

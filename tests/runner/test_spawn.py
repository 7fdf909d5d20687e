"""Scripts that start their own ranks, by mp.spawn or torchelastic, find them started.

The scripts lie in tests/scripts/. Each runs once as it was written to be run, on Gloo, and once
under mpirun, and ends with the same losses and parameters.
"""

import re
import time
from typing import Any

import patience
import pytest
from script_runs import SCRIPTS, by_rank, free_port, launch, start, start_on_gloo

pytestmark = pytest.mark.timeout(100)

# Seconds from a failure to the end of the job, on a machine that is busy.
AT_ONCE = 25


def command(script: str, ranks: int) -> list[Any]:
    """Return the script's command line, with which it starts `ranks` ranks."""
    arguments = {
        "spawn_note.py": [ranks, free_port()],
        "spawn_imagenet.py": [
            *("--dist-url", f"tcp://127.0.0.1:{free_port()}", "--devices", ranks),
            *("--world-size", 1, "--rank", 0, "--times", 2),
        ],
        "elastic.py": [ranks],
    }
    return [SCRIPTS / script, *map(str, arguments[script])]


@pytest.mark.thorough
@pytest.mark.essential
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "script",
    [
        "spawn_note.py",
        pytest.param("spawn_imagenet.py", marks=pytest.mark.slow),
        pytest.param("elastic.py", marks=pytest.mark.slow),
    ],
)
def test_same_losses(script: str, ranks: int) -> None:
    expected = start_on_gloo(lambda: command(script, ranks), ranks)

    done = launch(*command(script, ranks), ranks=ranks)
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1  # what was replaced
    trained = by_rank(done.stdout)
    assert sorted(trained) == list(range(ranks))
    for rank, mine in trained.items():
        assert mine["losses"] == pytest.approx(expected[rank]["losses"], rel=1e-5)
        assert mine["sum"] == pytest.approx(expected[rank]["sum"], rel=1e-4)


@pytest.mark.once
@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_else_scripts_expect(ranks: int) -> None:
    """See the script: arguments, several launches, join, errors, calls that launch no ranks."""
    done = launch(SCRIPTS / "spawn_details.py", ranks=ranks)
    assert done.returncode == 0
    said = re.findall(r"rank (\d): all well", done.stdout)
    assert sorted(said) == [str(rank) for rank in range(ranks)]


@pytest.mark.essential
def test_torchrun_from_python() -> None:
    inner = ["-m", "timeit", "-n", "1", "-r", "1"]
    done = launch(SCRIPTS / "calls_torchrun.py", "2", *inner)
    assert done.returncode == 0
    assert done.stdout.count("1 loop, best of 1") == 4
    assert done.stdout.count("all well") == 2


def test_rank_that_fails_while_others_wait_for_it() -> None:
    code = (
        "import sys, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def f(rank):\n"
        "    dist.init_process_group('gloo')\n"
        "    if rank == 1: raise KeyError('broken on purpose')\n"
        "    dist.barrier()\n"
        "try: mp.spawn(f, nprocs=2)\n"
        "except Exception: pass\n"
    )
    begin = time.monotonic()
    done = launch("-c", code)
    assert done.returncode == 1
    assert "KeyError: 'broken on purpose'" in done.stderr
    assert "started_ranks.py" not in done.stderr
    assert time.monotonic() - begin < patience.enough(AT_ONCE)


@pytest.mark.once
def test_other_numbers_are_refused() -> None:
    """In a world of one, which a script makes that was started without mpirun."""
    done = start("-m", "mpiddp", *command("spawn_note.py", 2))
    assert done.returncode == 1
    said = (
        r"ValueError: rank 0: torch\.multiprocessing\.spawn was asked for 2 processes, but MPI "
        r"started 1, and .* start the script with mpirun -n 2, or let it ask for 1\. .*--keep-spawn"
    )
    assert re.search(said, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["spawn_note.py", "elastic.py"])
def test_other_numbers_end_the_job(script: str) -> None:
    done = launch(*command(script, 3))
    assert done.returncode == 1
    assert re.search(r"was asked for 3 processes.* but MPI started 2", done.stderr)


@pytest.mark.slow
@pytest.mark.once
def test_kept() -> None:
    """With --keep-spawn the ranks are the processes that the script starts."""
    start_on_gloo(lambda: ["-m", "mpiddp", "--keep-spawn", *command("spawn_note.py", 2)], 2)

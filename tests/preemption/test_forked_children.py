"""Processes that a rank forks end by the signals that the rank itself takes as an announcement."""

from pathlib import Path

import mpirun
import patience
import pytest

SCRIPT = """
import multiprocessing, os, signal, sys, time

import torch.distributed as dist

import mpiddp
from mpiddp import preemption

what, before = sys.argv[1:]
heard = []
if before == "handler":
    signal.signal(signal.SIGTERM, lambda *_: (heard.append(1), os._exit(7)) if child else None)
child = False
mpiddp.init_process_group()
preemption.install()
fork = multiprocessing.get_context("fork")


def sleep(ready):
    global child
    child = True
    ready.set()
    while True:
        time.sleep(1)


def square(number):
    return number * number


if what == "pool":
    for _ in range(5):
        with fork.Pool(2) as pool:
            assert pool.map(square, range(4)) == [0, 1, 4, 9]
elif what == "daemon":
    ready = fork.Event()
    fork.Process(target=sleep, args=(ready,), daemon=True).start()
    ready.wait()
else:
    ready = fork.Event()
    process = fork.Process(target=sleep, args=(ready,))
    process.start()
    ready.wait()
    os.kill(process.pid, getattr(signal, what))
    process.join()
    expected = 7 if before == "handler" else -getattr(signal, what)
    assert process.exitcode == expected, process.exitcode
assert not preemption.requested()
if dist.get_rank() == 0:
    print("the end", flush=True)
mpiddp.destroy_process_group()
"""


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=2)
@pytest.mark.timeout(700)
@pytest.mark.parametrize("runner", [False, True])
@pytest.mark.parametrize(
    ("what", "before"),
    [
        ("daemon", "nothing"),
        ("pool", "nothing"),
        ("SIGTERM", "nothing"),
        ("SIGUSR2", "nothing"),
        ("SIGTERM", "handler"),
    ],
)
def test_they_end(what: str, before: str, runner: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["-m", "mpiddp"] if runner else []
    done = mpirun.run(2, [*command, script, what, before], timeout=patience.enough(60))
    assert done.returncode == 0, done.stderr
    assert "the end" in done.stdout

"""A job that is stopped as a whole: what it was stopped for counts for no time limit.

SIGSTOP is what `scontrol suspend` sends.
"""

import os
import signal
import threading
import time
from pathlib import Path

import mpirun
import pytest

pytestmark = pytest.mark.timeout(100)

# Seconds: the time limit, and how long the ranks are stopped.
LIMIT, STOPPED = 8, 9

# Every kind of wait at once, each in a group of its own.
SOURCE = """\
import os, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
import mpiddp

folder = sys.argv[1]
mpiddp.init_process_group(timeout=timedelta(seconds=60))
rank = dist.get_rank()
groups = [dist.new_group() for _ in range(5)]
model = mpiddp.DistributedDataParallel(torch.nn.Linear(10, 1), process_group=groups[4])
loss = model(torch.ones(1, 10)).sum()
dist.barrier()
for group in groups:
    group.set_timeout(timedelta(seconds=LIMIT))
ended = []


def collective():
    dist.all_reduce(torch.ones(4), group=groups[0])


def future():
    dist.all_reduce(torch.ones(4), group=groups[1], async_op=True).get_future().wait()


def two_threads():
    work = dist.all_reduce(torch.ones(4), group=groups[2], async_op=True)
    other = threading.Thread(target=work.wait)
    other.start()
    work.wait()
    other.join()


def barrier():
    dist.monitored_barrier(groups[3])


def run(wait):
    wait()
    ended.append(wait)


dist.barrier()
open(f"{folder}/pid-{os.getpid()}", "w").close()
while rank == 1 and not os.path.exists(f"{folder}/go"):
    time.sleep(0.05)
threads = [threading.Thread(target=run, args=[each]) for each in KINDS]
for thread in threads:
    thread.start()
loss.backward()
for thread in threads:
    thread.join()
assert len(ended) == len(threads)
print("all well")
"""


def stop_and_continue(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob("pid-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    processes = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    time.sleep(1)  # until the first rank has begun to wait
    for number, seconds in ((signal.SIGSTOP, STOPPED), (signal.SIGCONT, 0.5)):
        for process in processes:
            os.kill(process, number)
        time.sleep(seconds)
    (folder / "go").touch()


# An operation for which nobody waits; later ones of its group look whether its time is over.
UNWATCHED = """\
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import mpiddp

folder = sys.argv[1]
mpiddp.init_process_group(timeout=timedelta(seconds=60))
rank = dist.get_rank()
part = dist.new_group(timeout=timedelta(seconds=LIMIT))
begin = lambda: dist.all_reduce(torch.ones(4), group=part, async_op=True)
dist.barrier()
works = [begin()] if rank == 0 else []
open(f"{folder}/pid-{os.getpid()}", "w").close()
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.05)
if rank == 0:
    time.sleep(1)
    works += [begin() for _ in range(20)]
    open(f"{folder}/begun", "w").close()
while not os.path.exists(f"{folder}/begun"):
    time.sleep(0.05)
if rank == 1:
    works = [begin() for _ in range(21)]
for work in works:
    work.wait()
print("all well")
"""


@pytest.mark.essential(keep=1)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("thread", "kinds"),
    [
        (None, "collective, future, two_threads, barrier"),
        pytest.param("0", "collective, barrier", marks=pytest.mark.slow),
    ],
    ids=["", "without a thread"],
)
def test_all_ranks_go_on(tmp_path: Path, thread: str | None, kinds: str) -> None:
    run(tmp_path, SOURCE.replace("KINDS", f"[{kinds}]"), thread)


@pytest.mark.thorough
def test_an_operation_that_nobody_waits_for(tmp_path: Path) -> None:
    run(tmp_path, UNWATCHED)


def run(tmp_path: Path, source: str, thread: str | None = None) -> None:
    """Run a script on ranks that are stopped and go on; they say that all is well."""
    script = tmp_path / "script.py"
    script.write_text(source.replace("LIMIT", str(LIMIT)))
    stopping = threading.Thread(target=stop_and_continue, args=[tmp_path])
    stopping.start()
    done = mpirun.run(2, [script, tmp_path], timeout=80, env={"MPIDDP_PROGRESS_THREAD": thread})
    stopping.join()
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert done.stdout.count("all well") == 2
    assert "has waited" not in done.stderr

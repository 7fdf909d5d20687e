"""One rank is killed in the middle of what measures, compares or shows.

    mpirun -n 3 python kill_in_feature.py WHERE WHO FOLDER

Rank WHO notes the time in the FOLDER, and is killed

- times: before it tells the others how long its steps took with a bucket size;
- memory: while all take memory for buckets of another size;
- compare, compared: before it tells the others of its last 25 steps, or after that;
- write: when it has written a part of a checkpoint;
- wait: while it waits for the rank that writes one.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mpiddp
from mpiddp import DistributedDataParallel as DDP
from mpiddp import checkpoint, shown_progress
from mpiddp.ddp.bucket_tuning import BucketTuning
from mpiddp.ddp.slow_ranks import StepComparison
from mpiddp.reducer import building

WHERE, WHO, FOLDER = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
# 64 MiB, of which some are written between two looks.
ELEMENTS = 1 << 24


def kill() -> None:
    (FOLDER / "began").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def before(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return a function that is killed when it is called so often."""
    calls = 0

    def called(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            time.sleep(0.3)  # the others wait by now
            kill()
        return function(*arguments, **options)

    return called


def after(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any) -> None:
        function(*arguments)
        time.sleep(0.3)
        kill()

    return called


def arrange() -> None:
    """Let this rank be killed where it is to be."""
    if WHERE == "times":
        BucketTuning._slowest = before(BucketTuning._slowest, 2)  # type: ignore[method-assign]
    elif WHERE == "memory":
        building._allocate = before(building._allocate, 2)
    elif WHERE == "compare":
        StepComparison.begin = before(StepComparison.begin, 1)  # type: ignore[method-assign]
    elif WHERE == "compared":
        StepComparison.begin = after(StepComparison.begin)  # type: ignore[method-assign]
    elif WHERE == "write":
        shown_progress.advance = before(shown_progress.advance, 3)


torch.set_num_threads(1)
mpiddp.init_process_group()
if WHERE in ("write", "wait"):
    state = {"large": torch.ones(ELEMENTS), "small": torch.ones(3)}
    checkpoint.save({"small": torch.ones(3)}, FOLDER / "checkpoints", step=1)
    if dist.get_rank() == WHO:
        arrange()
        if WHERE == "wait":
            threading.Timer(0.5, kill).start()
    elif WHERE == "wait":  # a disk that is slow
        shown_progress.advance = lambda number: time.sleep(0.3)
    for step in range(2, 50):
        checkpoint.save(state, FOLDER / "checkpoints", step=step)
else:
    # Two sizes make different buckets.
    layers = [torch.nn.Linear(256, 256) for _ in range(12)]
    model = DDP(torch.nn.Sequential(*layers), bucket_cap_mb="auto")
    if dist.get_rank() == WHO:
        arrange()
    for _ in range(100):
        model.zero_grad()
        model(torch.ones(4, 256)).sum().backward()
print("still here", flush=True)

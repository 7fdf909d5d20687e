"""Save checkpoints in a process that is killed at random moments, and load after each kill.

    python save_until_killed.py FOLDER KILLS SEED save|async_save

Each process goes on from what it loads. Prints a line of JSON: how often a kill met a save halfway,
and the steps that were loaded.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from mpiddp import checkpoint

ELEMENTS = 300_000


def save_for_ever(root: Path, how: str, step: int) -> None:
    save = getattr(checkpoint, how)
    while True:
        step += 1
        state = {"a": torch.full((ELEMENTS,), float(step)), "b": [torch.tensor(step)]}
        save(state, root, step=step, keep=2)


def processor_time(pid: int) -> float:
    """Return the seconds for which another process has run, as by clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)


def main() -> None:
    root, kills, seed, how = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    draw = random.Random(seed)
    halfway, steps = 0, []
    last = 0
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            save_for_ever(root, how, last)
        moment = draw.uniform(0, 0.06)
        while processor_time(child) < moment:  # not of the clock: this machine may be busy
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        halfway += any(root.glob(".*"))
        found = checkpoint.load(root)
        if found is None:
            assert last == 0
            continue
        assert found.step >= last
        last = found.step
        assert found.state["b"][0] == last
        assert (found.state["a"] == last).all()
        steps.append(last)
    print(json.dumps({"halfway": halfway, "steps": steps}))


if __name__ == "__main__":
    main()

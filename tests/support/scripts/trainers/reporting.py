"""What trainers' scripts share: a report of losses and of when each step ended, and words."""

import json
import os
import sys
import time
from typing import Any

import torch.distributed as dist

__all__ = ["WORDS", "Report"]

# Of which the programs that read words make their sentences.
WORDS = (
    *("the", "a", "cat", "dog", "sits", "runs", "on", "under"),
    *("mat", "tree", "green", "red", "quick", "slow"),
)


class Report:
    """Collects the losses of one rank."""

    def __init__(self, case: str) -> None:
        self._case = case
        self._losses: list[float] = []
        self._times: list[float] = []

    def step(self, loss: float) -> None:
        """Note that a step has ended."""
        self._losses.append(float(loss))
        self._times.append(time.perf_counter())

    def say(self, model: Any, **more: Any) -> None:
        """Print all as a line of JSON, while there is a process group."""
        said = {
            "case": self._case,
            "rank": dist.get_rank(),
            "world": dist.get_world_size(),
            "backend": dist.get_backend(),
            "wrapper": type(model).__module__,
            "losses": self._losses,
            "times": self._times,
            **more,
        }
        # On a line of its own, whatever another rank has begun to print.
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), f"\n{json.dumps(said)}\n".encode())

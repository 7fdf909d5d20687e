"""The parts of a step: each moment of a rank's step belongs to one of them."""

from __future__ import annotations

__all__ = [
    "BACKWARD",
    "CHECKPOINT",
    "COLLECTIVES",
    "DATA",
    "EXPOSED",
    "FORWARD",
    "LOSS",
    "NAMES",
    "OPTIMIZER",
    "OTHER",
    "WAITING",
    "part_of",
]

# Where two of them overlap, the later one counts: a collective that runs behind the forward costs
# nothing, and an optimizer that steps while buckets are waited for is no wait.
OTHER, LOSS, COLLECTIVES, FORWARD, BACKWARD, WAITING, EXPOSED, DATA, CHECKPOINT, OPTIMIZER = range(
    10
)

NAMES = {
    FORWARD: "forward",
    LOSS: "between forward and backward",
    BACKWARD: "backward",
    EXPOSED: "exposed communication",
    WAITING: "waiting for the slowest rank",
    OPTIMIZER: "optimizer",
    DATA: "data loading",
    CHECKPOINT: "checkpoints",
    COLLECTIVES: "collectives of the program",
    OTHER: "other",
}

_BY_NAME = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "DataLoader.__next__": DATA,
}


def part_of(name: str) -> int | None:
    """Return the part that an event of a thread belongs to, None if to none by itself.

    Not collective.
    """
    if name.startswith("optimizer: "):
        return OPTIMIZER
    if name.startswith(("checkpoint", "snapshot")):
        return CHECKPOINT
    return _BY_NAME.get(name)

"""How long tests wait: on a machine that is busy with other things, longer than at rest."""

import os

__all__ = ["enough", "factor"]

# The runs of `make test` alone are 5 processes or so at a time.
_AT_REST = 3.0  # waiting and running processes a core
_MOST = 10.0


def factor() -> float:
    """Return how much longer than at rest things may take now, 1 or more."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return min(max(load / cores / _AT_REST, 1.0), _MOST)


def enough(seconds: float) -> float:
    """Return the limit for now of what may take `seconds` at rest."""
    return seconds * factor()

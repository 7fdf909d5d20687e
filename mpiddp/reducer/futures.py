"""Wait for the futures that hooks have returned, within a time limit."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any


def completed(future: Any, timeout: timedelta) -> bool:
    """Wait until a torch future is completed; return whether it was in time. Not collective."""
    if future.done():
        return True
    event = threading.Event()
    future.add_done_callback(lambda _: event.set())
    return event.wait(timeout.total_seconds())


def wait_for_all(futures: Iterable[Any], rank: str, timeout: timedelta) -> None:
    """Wait for the futures that hooks of the buffers have returned. Not collective.

    Raises:
        RuntimeError: one has not completed in time. What a future failed with is raised as it is.
    """
    for future in futures:
        if not completed(future, timeout):
            raise RuntimeError(
                f"rank {rank}: a future that a communication hook of the buffers returned has not "
                f"completed within {timeout.total_seconds():g} s"
            )
        future.wait()

"""Say of ranks that do not answer what the node knows: whether they run, what they did last.

What they did last stands in Note [A page for others]; whether they run, Linux tells in /proc.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpiddp import settings
from mpiddp.flight_recorder import page
from mpiddp.flight_recorder.call_text import ranks_in_words
from mpiddp.flight_recorder.sources import BUCKETS

__all__ = ["STATES", "begin", "describe_silent", "end"]

# The states of /proc/PID/stat that tell something.
STATES = {
    "T": "is stopped, as by SIGSTOP or scontrol suspend",
    "t": "is stopped by a debugger",
    "Z": "has ended, and its launcher has not noticed",
    "X": "has ended",
    "D": "is in a call of the system that cannot be interrupted, such as one of a file system that "
    "does not answer",
    "R": "runs outside Python, or without letting other threads of Python run",
    "S": "sleeps outside Python, or without letting other threads of Python run",
}


@dataclass
class _Process:
    number: int
    began: str  # in ticks since the machine started: another process may get its number later
    page: mmap.mmap | None


# The other ranks of this node, by their ranks in the world.
_processes: dict[int, _Process] = {}


def begin(processes: Mapping[int, tuple[int, int]]) -> None:
    """Remember the other ranks of this node. Not collective; they are alive.

    Args:
        processes: by rank in the world: the number of the process, and of the descriptor there of
            its page; -1 for none.
    """
    end()
    for rank, (number, descriptor) in processes.items():
        _, began = _stat(number)
        _processes[rank] = _Process(number, began, _page(number, descriptor))


def end() -> None:
    """Forget them. Not collective."""
    for process in _processes.values():
        if process.page is not None:
            process.page.close()
    _processes.clear()


def describe_silent(world_ranks: Sequence[int], ranks: Sequence[int]) -> list[str]:
    """Return sentences about ranks that do not answer. Not collective.

    Args:
        world_ranks: of the group.
        ranks: in the group.
    """
    told: dict[str, list[int]] = {}
    for rank in ranks:
        told.setdefault(_describe(world_ranks[rank]), []).append(rank)
    return [
        f"{ranks_in_words(world_ranks, each)} {'does' if len(each) == 1 else 'do'} not answer "
        f"({words})"
        for words, each in told.items()
    ]


def _describe(rank: int) -> str:
    process = _processes.get(rank)
    without_thread = settings.PROGRESS_THREAD.read() is False
    if process is None:
        words = "ended, or stuck outside Python"
        if without_thread:
            words += (
                f"; with {settings.PROGRESS_THREAD.name}=0 ranks answer only while they wait for "
                f"others, and not inside of MPI"
            )
        return words
    state, began = _stat(process.number)
    memory = b""
    if process.page is not None:
        with contextlib.suppress(ValueError):  # closed
            memory = process.page[: page.BYTES]
    left = page.read(memory)[2]
    if not state or began != process.began:
        words = "has ended"
    elif left and state in "RS":
        words = "has left: its program has ended, or called destroy_process_group"
    elif without_thread and state in "RS":
        words = (
            f"waits for no other rank, or waits inside of MPI: with "
            f"{settings.PROGRESS_THREAD.name}=0 ranks answer only while they wait elsewhere"
        )
    else:
        words = f"{STATES.get(state, 'is alive')}: state {state} in /proc/{process.number}/stat"
    words = f"process {process.number} on {socket.gethostname()} {words}"
    return f"{words}; {_last(memory)}" if memory else words


def _last(memory: bytes) -> str:
    """Return in words what a page says."""
    operation, bucket, _ = page.read(memory)
    parts = []
    if operation is not None:
        words = operation.words
        # "" for a message, and where the page has names of so many later groups.
        if operation.source == words:
            words += f", #{operation.number}"
        elif operation.source:
            words += f", #{operation.number} of group {operation.source!r}"
        parts.append(f"{words} ({_how(operation.began, operation.ended)})")
    if bucket is not None:
        backward, index = divmod(bucket.number, BUCKETS)
        module = bucket.source or "a module"
        words = f"bucket {index} of backward pass {backward + 1} of {module}"
        parts.append(f"{words} ({_how(bucket.began, bucket.ended)})")
    if operation is not None and bucket is not None and bucket.began > operation.began:
        parts.reverse()
    if not parts:
        return "it has begun no operation"
    before = f", and before that {parts[1]}" if len(parts) > 1 else ""
    return f"the last it began was {parts[0]}{before}"


def _how(began: float, ended: float) -> str:
    # All processes of a node have the same monotonic clock.
    seconds = time.monotonic() - (ended if ended > 0 else began)
    if ended < 0:
        return f"given up, begun {seconds:.0f} s ago"
    return f"{'ended' if ended > 0 else 'not ended, begun'} {seconds:.0f} s ago"


def _stat(number: int) -> tuple[str, str]:
    """Return the state of a process, and when it began; "" if there is none."""
    try:
        with open(f"/proc/{number}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _page(number: int, descriptor: int) -> mmap.mmap | None:
    if descriptor < 0:
        return None
    try:
        opened = os.open(f"/proc/{number}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # some sandboxes; and where it has just died
        return None
    try:
        return mmap.mmap(opened, page.BYTES, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(opened)

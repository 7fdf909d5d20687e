"""Write the records of this rank to a file: at a time-out, an abort, a signal, or on request.

TORCH_FR_DUMP_TEMP_FILE is honoured, as by torch's own recorder: what the names of the files begin
with, before the rank. Without it each job has a folder of its own in the user's cache.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from mpiddp.engine import forks
from mpiddp.flight_recorder import ring, sources
from mpiddp.flight_recorder.torch_format import as_dict, size_wanted
from mpiddp.mpi.abort import call_before_abort
from mpiddp.private_folder import private_folder

__all__ = [
    "begin", "dump", "dump_for", "dump_soon", "job_name", "rank", "say", "size_wanted", "where",
    "world",
]  # fmt: skip

# The watchdog and the search for dead ranks read the records, so some are kept in any case.
_LEAST_SIZE = 64

# How long a dump waits for another one of this process.
_PATIENCE = 5.0

_job = "unknown"
_rank = 0
_size = 1
_writing = threading.Lock()
_background: threading.Thread | None = None
_abort_is_watched = False


def job_name() -> str:
    """Return a name for this job, as its rank 0 gives it to all. Not collective."""
    job = os.environ.get("SLURM_JOB_ID", "")
    of_slurm = f"slurm-{job}-" if job else ""  # which may have several steps, begun at once
    begun = time.strftime("%Y%m%d-%H%M%S")
    return f"{begun}-{of_slurm}{socket.gethostname()}-{os.getpid()}"


def begin(job: str, rank: int, size: int) -> None:
    """Forget what was recorded, and record from now on. Not collective.

    Args:
        job: `job_name` of rank 0.
        rank: this process's in the world.
        size: of the world.
    """
    global _job, _rank, _size, _abort_is_watched
    _job, _rank, _size = job, rank, size
    ring.allocate(max(size_wanted(), _LEAST_SIZE))
    sources.begin()
    if not _abort_is_watched:
        _abort_is_watched = True
        call_before_abort(_dump_before_abort)


def rank() -> int:
    """Return this process's rank in the world, as `begin` was told it. Not collective."""
    return _rank


def world() -> dict[str, str | int]:
    """Return the job's name and how many ranks it has, as `begin` was told. Not collective."""
    return {"job": _job, "size": _size}


def where() -> str:
    """Return where `dump` writes to without a path; "" if there is no home folder.

    Not collective.
    """
    try:
        return os.fspath(_default_path())
    except RuntimeError:
        return ""


def dump(path: str | os.PathLike[str] | None = None, *, reason: str = "dump()") -> Path:
    """Write the records of this rank to a file, whole or not at all, and return its path.

    Not collective: other ranks need not do so. Works in any thread, also while another one waits
    for MPI.

    Args:
        path: of the file; None: the rank after TORCH_FR_DUMP_TEMP_FILE, or else after
            ~/.cache/mpiddp/flight_recorder/JOB/rank_ (XDG_CACHE_HOME instead of ~/.cache).
        reason: why, in words.

    Raises:
        OSError: the file cannot be written.
        RuntimeError: there is no home folder.
        TimeoutError: another thread has been writing for 5 s.
    """
    target = _default_path() if path is None else Path(path)
    _write(target, reason, durable=True)
    return target


def _write(target: Path, reason: str, durable: bool) -> None:
    """Write the file; `durable`: return only when it would survive a crash of the node."""
    if not _writing.acquire(timeout=_PATIENCE):
        raise TimeoutError("another thread has been writing the flight recorder's file for 5 s")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # No other file there may begin like a dump: the analyzer would read it.
        descriptor, temporary = tempfile.mkstemp(prefix=".unfinished-", dir=target.parent)
        try:
            with open(descriptor, "wb") as file:
                pickle.dump(as_dict(reason), file, protocol=4)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    finally:
        _writing.release()


def dump_for(reason: str) -> str:
    """Dump, and return a sentence that says where; "" if that was not possible. Not collective."""
    if not size_wanted():
        return ""
    for target in (_default_path, _path_on_this_node):
        # Where the home folder is missing, full or read-only, this node's own disk may do. Not
        # durable: a busy disk takes seconds for that, in which this rank would answer nobody.
        with contextlib.suppress(OSError, RuntimeError):
            path = target()
            _write(path, reason, durable=False)
            break
    else:
        return ""
    return (
        f"What this rank did last is in {path}; for all ranks that could write theirs: "
        f"python -m mpiddp.flight_recorder {path.parent}"
    )


def dump_soon(reason: str) -> bool:
    """Begin to dump in another thread, for one that must not wait for the disk. Not collective.

    Returns:
        False if the thread still writes for an earlier call.
    """
    global _background
    if _background is not None and _background.is_alive():
        return False
    # Not a daemon: the file is whole when the process has ended.
    _background = threading.Thread(
        target=dump_for, args=(reason,), name="mpiddp flight recorder", daemon=False
    )
    with contextlib.suppress(RuntimeError):  # the interpreter ends already
        _background.start()
    return True


def say(reason: str) -> None:
    """Dump, and print where. Not collective."""
    told = dump_for(reason) or "the flight recorder's file cannot be written"
    with contextlib.suppress(Exception):  # a stream that takes nothing
        print(f"mpiddp: rank {_rank}: {reason}: {told}", file=sys.stderr, flush=True)


def _default_path() -> Path:
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE", "")
    if prefix:
        return Path(f"{prefix}{_rank}")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "mpiddp", "flight_recorder", _job, f"rank_{_rank}")


def _path_on_this_node() -> Path:
    user = os.geteuid()
    folder = private_folder(Path(tempfile.gettempdir(), f"mpiddp-flight-recorder-{user}"))
    return folder / _job / f"rank_{_rank}"


def _dump_before_abort() -> None:
    # If nothing is under way, the traceback says it all.
    if not forks.forked() and ring.under_way():
        dump_for("an abort")

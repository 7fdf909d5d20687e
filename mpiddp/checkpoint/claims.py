"""Whose snapshots a folder holds: those of one training at a time, which has put up its sign there.

The sign is a file that says which process keeps the snapshots, of which program, job and start of
the job. It is locked as long as that process has it open; the lock goes with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

__all__ = ["claim", "name_in_slurm", "release"]

_NAME = ".training"

# The open sign of each folder that this process has claimed. POSIX's locks are the process's: a
# forked child has none, and closing any descriptor of the file gives it back.
_held: dict[Path, int] = {}


def name_in_slurm() -> str | None:
    """Return a name that this program has again when its job is requeued, None elsewhere.

    Not collective.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    # No number of a step: mpirun's ranks have that of their launcher, or none.
    script = os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else ""
    told = hashlib.sha256("\0".join([script, *sys.argv[1:]]).encode()).hexdigest()
    return f"{job}-{Path(script).stem}-{told[:12]}"


def claim(root: Path, named: bool) -> None:
    """Keep `root` for this process, if there is such a folder of this user's. Not collective.

    Args:
        root: the snapshots' folder on this node.
        named: whether the user has named the training. Else another start of the same program
            within one start of the job may be of other settings, which no name tells.

    Raises:
        RuntimeError: another training has it.
    """
    sign = root / _NAME
    held = _held.get(root)
    with contextlib.suppress(FileNotFoundError):
        if held is not None and os.path.samestat(os.fstat(held), sign.stat()):
            return
    release(root)
    descriptor = _open(root)
    if descriptor is None:
        return
    try:
        before, own = _read(descriptor), _own()
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _stranger(root, before, "keeps its snapshots there") from None
        except OSError:
            pass  # a file system without locks
        same = "job" in before and all(before[key] == own.get(key) for key in ("job", "start"))
        if same and not named and before != own:
            raise _stranger(root, before, "has left its snapshots there")
        with contextlib.suppress(OSError):  # there is no memory
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(own).encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    _held[root] = descriptor


def release(root: Path) -> None:
    """Let others have `root`, whose sign stays. Harmless without `claim`. Not collective."""
    descriptor = _held.pop(root, None)
    if descriptor is not None:
        os.close(descriptor)


def _open(root: Path) -> int | None:
    # By the folder that was looked at: another user may put one in its place.
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | flags)
        try:
            if os.fstat(folder).st_uid != os.geteuid():
                return None
            return os.open(_NAME, os.O_RDWR | os.O_CREAT | flags, 0o600, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError:
        return None  # no folder, or no memory: who writes there says so


def _read(descriptor: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        told = json.loads(os.pread(descriptor, 1 << 16, 0))
        if isinstance(told, dict):
            return told
    return {}


def _own() -> dict[str, Any]:
    told: dict[str, Any] = {
        "process": os.getpid(),
        "began": _beginning(),
        "host": socket.gethostname(),
        "program": " ".join(sys.argv),
    }
    if "SLURM_JOB_ID" in os.environ:
        told["job"] = os.environ["SLURM_JOB_ID"]
        told["start"] = os.environ.get("SLURM_RESTART_COUNT", "0")
    return told


def _beginning() -> str:
    """Return when this process began, in the system's ticks."""
    try:
        return Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _stranger(root: Path, told: dict[str, Any], what: str) -> RuntimeError:
    job = f" of SLURM's job {told['job']}" if "job" in told else ""
    return RuntimeError(
        f"{root} is another training's: process {told.get('process', '?')} on "
        f"{told.get('host', '?')}{job} ({told.get('program') or 'python'}) {what}. Each training "
        f"needs a name of its own, the same when it is started again: Snapshots(name)"
    )

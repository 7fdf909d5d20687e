"""The folders of checkpoints.

    checkpoints/
        000007-step-1200/            whole
            state.pt                 or what torch.distributed.checkpoint writes
            SHA256SUMS               `sha256sum -c SHA256SUMS` checks it too
        .000008-step-1300.writing/   under way, or left by a job that was killed

A checkpoint gets its name in one step, by a rename, after all its bytes are on the disk. The first
number counts saves: what is saved last is the newest, also when a job begins anew with step 0.
Who calls `begin`, `finish` or `prune` holds the lock of writer_lock.py.
"""

from __future__ import annotations

import hashlib
import operator
import os
import re
import shutil
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path

from mpiddp import shown_progress
from mpiddp.private_folder import private_folder

__all__ = [
    "STATE",
    "Entry",
    "as_step",
    "begin",
    "bytes_in",
    "entries",
    "entries_of_user",
    "finish",
    "go_on_from",
    "is_users",
    "make_private",
    "prune",
    "sha256",
    "sums_of",
    "sync",
    "verify",
    "whole_of",
]

STATE = "state.pt"
SUMS = "SHA256SUMS"
_NAME = re.compile(r"(\d{6,})-step-(-?\d+)")
_WRITING, _REMOVING = ".writing", ".removing"
_BLOCK = 1 << 20

# The number of what this process has saved last into each root, and the highest that it has seen.
_saved: dict[Path, int] = {}
_seen: dict[Path, int] = {}


@dataclass(frozen=True, order=True)
class Entry:
    """One whole checkpoint.

    Attributes:
        number: counts the saves into its root.
        step: what the user called it.
        path: its folder.
        sharded: whether torch.distributed.checkpoint wrote it.
    """

    number: int
    step: int
    path: Path
    sharded: bool


def entries(root: Path) -> list[Entry]:
    """Return the checkpoints in `root`, the newest first. Not collective."""
    found = []
    if root.is_dir():
        for path in root.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                sharded = (path / ".metadata").exists()
                found.append(Entry(int(match[1]), int(match[2]), path, sharded))
    return sorted(found, reverse=True)


def entries_of_user(root: Path) -> list[Entry]:
    """Return the checkpoints in `root` if that is this user's folder, the newest first.

    Not collective. For where others may write, and what they have written is not to be unpickled.
    """
    if not is_users(root):
        return []
    # It may have been open to all once.
    return [entry for entry in entries(root) if is_users(entry.path)]


def is_users(root: Path) -> bool:
    """Return whether there is such a folder, no link, and it is this user's. Not collective."""
    try:
        status = root.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def make_private(root: Path) -> None:
    """Make a folder that only this user can read and write. Not collective.

    Raises:
        PermissionError: another user has made it.
        OSError: it cannot be made.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    private_folder(root)


def go_on_from(root: Path, number: int) -> None:
    """Let the next save into `root` have a higher number than one on some host. Not collective."""
    _seen[root.resolve()] = number


def sums_of(folder: Path) -> str:
    """Return the text of a checkpoint's sums, "" if it cannot be read. Not collective."""
    try:
        return (folder / SUMS).read_text()
    except (OSError, ValueError):
        return ""


def as_step(step: object) -> int:
    """Return a step as an int, which the names of folders need. Not collective.

    Raises:
        TypeError: it is a number that need not be whole, a string or something else.
    """
    try:
        return operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"step must be an int, as it is part of a folder's name, not {step!r} "
            f"({type(step).__name__})"
        ) from None


def begin(root: Path, step: int) -> Path:
    """Return a new folder in which a checkpoint may be written. Not collective.

    What killed jobs have left half-written goes first: there may be place for one only.
    """
    root.mkdir(parents=True, exist_ok=True)
    for _, path in _unfinished(root):
        _remove(path)
    known = entries(root)
    newest = known[0].number if known else 0
    if newest > _saved.get(root.resolve(), newest):
        warnings.warn(
            f"{known[0].path} was not saved by this process, which saves there too. Two jobs need "
            f"a folder each: each removes the other's oldest checkpoints, and loads its newest",
            RuntimeWarning,
            stacklevel=2,
        )
    # What could not be removed keeps its number.
    seen = _seen.get(root.resolve(), 0)
    number = max([newest, seen, *(number for number, _ in _unfinished(root))]) + 1
    name = f"{number:06d}-step-{as_step(step)}"
    writing = root / f".{name}{_WRITING}"
    writing.mkdir()
    return writing


def finish(writing: Path, sums: dict[str, str]) -> Path:
    """Give a folder of `begin` its name, once its files are on the disk. Not collective.

    Args:
        writing: the folder.
        sums: the sha256 of each of its files.

    Returns:
        the checkpoint's folder.
    """
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    (writing / SUMS).write_text(text)
    sync(writing / SUMS)
    sync(writing)
    whole = whole_of(writing)
    writing.rename(whole)
    sync(whole.parent)
    _saved[whole.parent.resolve()] = int(whole.name.partition("-")[0])
    return whole


def whole_of(writing: Path) -> Path:
    """Return the name that a folder of `begin` gets when it is whole. Not collective."""
    return writing.with_name(writing.name.removeprefix(".").removesuffix(_WRITING))


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep`, and what older saves left half-written. Not collective.

    What cannot be removed stays, with a RuntimeWarning: the checkpoint just saved is whole.
    """
    known = entries(root)
    for entry in known[keep:]:
        # Its name goes first: what is removed halfway is no checkpoint any more.
        removing = root / f".{entry.path.name}{_REMOVING}"
        try:
            entry.path.rename(removing)
        except OSError as error:
            _warn_of(entry.path, error)
        else:
            _remove(removing)
    for number, path in _unfinished(root):
        if number <= (known[0].number if known else 0):
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder; of a link only the link. Not collective."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path)
    except OSError as error:
        _warn_of(path, error)


def _warn_of(path: Path, error: OSError) -> None:
    warnings.warn(f"cannot remove {path}: {error}", RuntimeWarning, stacklevel=3)


def _unfinished(root: Path) -> list[tuple[int, Path]]:
    """Return the numbers and paths of what is half-written or half-removed. Not collective."""
    found = []
    for path in root.glob(".*"):
        match = _NAME.fullmatch(path.name.removeprefix(".").partition(".")[0])
        if match and path.suffix in (_WRITING, _REMOVING):
            found.append((int(match[1]), path))
    return found


def sha256(path: Path) -> str:
    """Return the digest of a file. Not collective."""
    digest = hashlib.sha256()
    block = bytearray(_BLOCK)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
            shown_progress.advance(count)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Return when a file, or a folder's list of names, is on the disk. Not collective."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        shown_progress.while_drawing(lambda: os.fsync(descriptor), size)
        shown_progress.advance(size)
    finally:
        os.close(descriptor)


def bytes_in(folder: Path, share: int = 0, shares: int = 1) -> int:
    """Return how many bytes `verify` reads. Not collective.

    Raises:
        OSError: a file is missing.
    """
    lines = sorted(sums_of(folder).splitlines())[share::shares]
    return sum((folder / line.partition("  ")[2]).stat().st_size for line in lines)


def verify(folder: Path, share: int = 0, shares: int = 1) -> str:
    """Return what is wrong with a checkpoint, "" if nothing is. Not collective.

    Args:
        folder: the checkpoint.
        share: which part of its files to read.
        shares: how many parts there are.
    """
    try:
        lines = sorted((folder / SUMS).read_text().splitlines())
        for line in lines[share::shares]:
            digest, _, name = line.partition("  ")
            if sha256(folder / name) != digest:
                return f"the sha256 of {name} is not the one in {SUMS}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    return "" if lines else f"{SUMS} is empty"

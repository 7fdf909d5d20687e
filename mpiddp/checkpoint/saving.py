"""Save a checkpoint: by one writer, or by all ranks where the state is sharded."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import operator
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mpiddp.checkpoint import folders, progress
from mpiddp.checkpoint.output import Output
from mpiddp.checkpoint.ranks import Ranks, raise_together, raise_told, told_of
from mpiddp.checkpoint.sharded import dcp_failures, is_sharded
from mpiddp.checkpoint.shared_folders import is_proved, prove
from mpiddp.checkpoint.trees import Copier
from mpiddp.checkpoint.writer_lock import only_writer
from mpiddp.shown_progress import while_drawing
from mpiddp.torch_internals.group_twins import twin_of
from mpiddp.torch_internals.regions import region

__all__ = ["async_save", "save", "write"]

# The one thread that writes in the background, and what it did last.
_background: concurrent.futures.ThreadPoolExecutor | None = None
_last: _Saving | None = None


class _Saving(Future["Path | None"]):
    """An asynchronous save, which knows whether somebody has asked how it ended.

    Args:
        rank: what this one is called, for the warning if nobody has.
    """

    def __init__(self, rank: str) -> None:
        super().__init__()
        self.rank = rank
        self.asked = False
        self.process_id = os.getpid()
        self.thread: int | None = None
        # From now on `cancel` does nothing: other ranks may save already.
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Path | None:
        self.asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.asked = True
        return super().exception(timeout)

    def run(self, function: Callable[..., Path], *arguments: Any) -> None:
        """Do it; for the thread in the background."""
        self.thread = threading.get_ident()
        try:
            self.set_result(function(*arguments))
        except BaseException as error:
            self.set_exception(error)

    def show_until_done(self) -> None:
        """Wait, and show how far it is; return at once where nothing is to be shown."""
        if not self.done():
            progress.wait_for(
                lambda seconds: bool(concurrent.futures.wait([self], seconds).done), self.thread
            )


def _say_at_exit() -> None:
    """Say that the last save has failed, if nobody else has. The thread has been joined."""
    if _last is None or _last.asked or not _last.done() or _last.process_id != os.getpid():
        return
    failure = _last.exception()
    if failure is not None:
        told = "".join(traceback.format_exception_only(failure)).strip()
        with contextlib.suppress(Exception):  # a stream that takes nothing
            print(
                f"mpiddp: {_last.rank}: the last asynchronous save has failed, and nobody has "
                f"asked for its result: {told}",
                file=sys.stderr,
                flush=True,
            )


def save(
    state: Any,
    root: str | os.PathLike[str],
    *,
    step: int,
    keep: int = 3,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save `state` as the newest checkpoint in `root`, and return when it is on the disk.

    Collective. A job that is killed meanwhile leaves the checkpoints that were there.

    Args:
        state: what `torch.save` takes, in dicts, lists and tuples. The first rank writes its own;
            what other ranks give is ignored. With sharded tensors in it (DTensor, ShardedTensor)
            it is a dict on all ranks, written by `torch.distributed.checkpoint.save`; then all
            ranks must see `root`.
        root: a folder that all ranks see under this name, made where it is missing. The first
            save looks whether they do, and warns, as only the first rank needs it.
        step: an int, returned by `load`; the same on all ranks.
        keep: how many checkpoints stay, this one included; the oldest go.
        group: the ranks that save together; default: all.

    Returns:
        the checkpoint's folder.

    Raises:
        BlockingIOError: another process is saving into `root`.
        OSError: this rank could not write, such as on a full disk.
        RuntimeError: another rank could not; ranks gave other steps; the last `async_save` failed;
            the state is sharded, and the error names hosts that do not see `root`.
        TypeError: `step` is no int.
        ValueError: `keep` is less than 1.
    """
    ranks = Ranks(group)
    place, sharded = _agree(ranks, state, root, step, keep)
    with region("checkpoint"):
        if sharded:
            return _save_sharded(state, *place, group)
        path, error = None, None
        if ranks.rank == 0:
            try:
                path = write(state, *place)
            except Exception as failure:
                error = failure
        raise_together(ranks, error, "save a checkpoint")
        saved: Path = ranks.from_first(path)
        return saved


def async_save(
    state: Any,
    root: str | os.PathLike[str],
    *,
    step: int,
    keep: int = 3,
    group: dist.ProcessGroup | None = None,
) -> Future[Path | None]:
    """Copy `state`, and save the copy while training goes on. Collective.

    If the one before is still being written, it is waited for. `save` waits as well, and the end of
    the program does, which says on stderr if the last one has failed and nobody has asked.

    Args:
        state: see `save`; it may change as soon as this returns.
        root: see `save`.
        step: see `save`.
        keep: see `save`.
        group: see `save`.

    Returns:
        a future of the checkpoint's folder; without sharded tensors it is None on all ranks but
        the first. ``result()`` raises what went wrong.

    Raises:
        RuntimeError: ranks gave other steps, the last asynchronous save has failed, or another
            rank could not copy its state.
        TypeError: `step` is no int.
        ValueError: `keep` is less than 1.
    """
    global _background, _last
    ranks = Ranks(group)
    place, sharded = _agree(ranks, state, root, step, keep)
    copy, error = None, None
    if sharded or ranks.rank == 0:
        try:
            with region("checkpoint: copy"):
                copy = Copier().copied(state)
        except Exception as failure:
            error = failure
    raise_together(ranks, error, "copy the state")
    if _background is None:
        atexit.register(_say_at_exit)
        _background = concurrent.futures.ThreadPoolExecutor(1, "mpiddp checkpoint")
    saving = _Saving(ranks.name(ranks.rank))
    if sharded:
        twin = None
        if dist.is_initialized():
            whole = dist.group.WORLD if group is None else group
            assert whole is not None
            twin = twin_of(whole)
        _background.submit(saving.run, _save_sharded, copy, *place, twin)
    elif ranks.rank == 0:
        _background.submit(saving.run, write, copy, *place)
    else:
        saving.set_result(None)
    _last = saving
    return saving


class _Place(NamedTuple):
    """Where a state goes, and what stays there."""

    root: Path
    step: int
    keep: int


def _agree(
    ranks: Ranks, state: Any, root: str | os.PathLike[str], step: int, keep: int
) -> tuple[_Place, bool]:
    """Return where to save, and whether the state is sharded, when the last save has ended.

    Collective. The last save is the last asynchronous one.

    Raises:
        RuntimeError: ranks differ, that save has failed, or another rank's arguments are wrong.
        TypeError: an argument is no int, or no path.
        ValueError: `keep` is less than 1.
    """
    global _last
    place, error = _Place(Path(), 0, 1), None
    try:
        place = _Place(Path(root), folders.as_step(step), operator.index(keep))
        if keep < 1:
            raise ValueError(f"keep must be 1 or more, not {keep}")
    except (TypeError, ValueError) as wrong:
        error = wrong
    failure = None
    if _last is not None:
        _last.show_until_done()
        failure = _last.exception()  # once it has ended
    own = place.step, is_sharded(state), told_of(failure), is_proved(place.root)
    told = ranks.gather((*own, told_of(error)))
    raise_told(ranks, error, [text for *_, text in told], "save a checkpoint")
    _last = None
    failed = [f"{ranks.name(rank)}: {each[2]}" for rank, each in enumerate(told) if each[2]]
    if failed:
        raise RuntimeError(f"the last asynchronous save has failed: {failed[0]}") from failure
    for rank, (its_step, its_sharded, *_) in enumerate(told):
        if its_step != told[0][0]:
            raise RuntimeError(
                f"{ranks.name(0)} saves step {told[0][0]}, {ranks.name(rank)} step {its_step}"
            )
        if its_sharded != told[0][1]:
            raise RuntimeError(
                f"the state has sharded tensors on {ranks.name(rank if its_sharded else 0)}, but "
                f"not on {ranks.name(0 if its_sharded else rank)}"
            )
    if not all(proved for *_, proved, _ in told):
        prove(ranks, place.root, told[0][1])
    return place, told[0][1]


@region("checkpoint: write")
def write(state: Any, root: Path, step: int, keep: int) -> Path:
    """Save a state by this process alone. Not collective.

    Raises:
        OSError: there is no space; or another process is saving there.
    """
    with only_writer(root):
        writing = folders.begin(root, step)
        name, whole = writing / folders.STATE, folders.whole_of(writing)
        try:
            with (
                open(name, "xb") as file,
                progress.shown(whole, "writing", lambda: progress.bytes_of(state)),
            ):
                torch.save(state, Output(file))
                file.flush()
                progress.retitle(whole, "to the disk")
                while_drawing(lambda: os.fsync(file.fileno()), file.tell())
            with progress.shown(whole, "its sha256", lambda: name.stat().st_size):
                digest = folders.sha256(name)
            path = folders.finish(writing, {folders.STATE: digest})
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        folders.prune(root, keep)
    return path


@region("checkpoint: write")
def _save_sharded(
    state: Any, root: Path, step: int, keep: int, group: dist.ProcessGroup | None
) -> Path:
    """Save each rank's shards. Collective."""
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    from mpiddp.checkpoint.shard_files import Writer

    ranks = Ranks(group)
    with contextlib.ExitStack() as held:
        writing, error = None, None
        if ranks.rank == 0:
            try:
                held.enter_context(only_writer(root))
                writing = folders.begin(root, step)
            except Exception as failure:
                error = failure
        raise_together(ranks, error, "save a checkpoint")
        writing = ranks.from_first(writing)
        assert writing is not None
        try:
            with dcp_failures(ranks, "save a checkpoint"):
                # `_finish_together` waits for the disk, and shows it.
                writer = Writer(writing, sync_files=False)
                dcp_save(state, storage_writer=writer, process_group=group)
            return _finish_together(root, writing, keep, ranks)
        except BaseException:
            if ranks.rank == 0:
                shutil.rmtree(writing, ignore_errors=True)
            raise


def _finish_together(root: Path, writing: Path, keep: int, ranks: Ranks) -> Path:
    """Give the checkpoint its name once each rank's files are on the disk. Collective."""
    path, error = None, None
    sums: dict[str, str] = {}
    whole = folders.whole_of(writing)
    try:
        files = [writing / name for name in _files_of(writing, ranks.rank)]
        with progress.shown(whole, "to the disk", lambda: _size_of(files)):
            for each in files:
                folders.sync(each)
        with progress.shown(whole, "its sha256", lambda: _size_of(files)):
            sums = {each.name: folders.sha256(each) for each in files}
    except Exception as failure:
        error = failure
    raise_together(ranks, error, "save a checkpoint")
    everyones = ranks.gather(sums)
    if ranks.rank == 0:
        try:
            path = folders.finish(writing, {n: s for each in everyones for n, s in each.items()})
            folders.prune(root, keep)
        except Exception as failure:
            error = failure
    raise_together(ranks, error, "save a checkpoint")
    named: Path = ranks.from_first(path)
    return named


def _size_of(files: list[Path]) -> int:
    return sum(each.stat().st_size for each in files)


def _files_of(writing: Path, rank: int) -> list[str]:
    """Return the names of the files that a rank has written. Not collective."""
    names = [each.name for each in writing.iterdir()]
    mine = [name for name in names if name.startswith(f"__{rank}_")]
    if rank == 0:  # it also writes the list of all shards, .metadata
        mine += [name for name in names if not name.startswith("__")]
    return sorted(mine)

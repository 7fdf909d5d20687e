"""Call a training function again when ranks were lost."""

from __future__ import annotations

import functools
import gc
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from mpiddp.elastic.state import State
from mpiddp.mpi import communicators, losses
from mpiddp.rendezvous import world

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["run"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def run(
    function: Callable[Concatenate[State, Arguments], Result],
) -> Callable[Concatenate[State, Arguments], Result]:
    """Return `function` so that it goes on when ranks are lost.

    Collective, after `init_process_group`. Before the function is called for the first time, the
    state goes on from a snapshot or checkpoint of an earlier job, if there is one. When a rank is
    lost, the others leave what they wait for with an error, make a new world of the ranks that are
    left, take the state of the rank that has come farthest, and call the function again: it wraps
    the model anew, and makes its groups and its loader.

    Where the MPI ends the job when a rank is lost, it says so once; the next job goes on.

    Args:
        function: takes the `State`, and whatever else.

    Raises:
        Whatever the function raises that is not the loss of a rank.
    """

    @functools.wraps(function)
    def elastic(state: State, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if losses.can_go_on():
            _Watch()
        elif dist.get_rank() == 0:
            print(
                f"mpiddp: rank 0: a rank that is lost ends this job, since {losses.why_not()}. "
                f"Started again, it goes on from its last snapshot or checkpoint",
                file=sys.stderr,
                flush=True,
            )
        begun = False
        while True:
            finished = False
            try:
                if begun or not state.resume():
                    state.sync()
                begun = True
                result = function(state, *args, **kwargs)
                finished = True
            except Exception as error:
                if not losses.can_go_on() or not _is_of_a_loss(error):
                    raise
                _let_go(error)
            if not losses.can_go_on() or _all_agree(world.communicator(), finished):
                return result
            _recover()

    return elastic


class _Watch:
    """Notices that a rank was lost while this one waits where MPI does not tell."""

    def __init__(self) -> None:
        self._communicator = world.communicator()
        world.add_companion(self)
        world.on_loss(_fail_everything)

    def look(self) -> None:
        if _has_lost(self._communicator):
            _fail_everything()

    def end(self) -> None:
        """Nothing is to be freed."""

    def leave(self) -> None:
        """Nothing is to be said."""


def _fail_everything() -> None:
    from mpi4py import MPI

    world.fail_what_is_under_way(MPI.ERR_PROC_FAILED)


def _has_lost(communicator: MPI.Intracomm) -> bool:
    if not communicator:
        return False
    failed = communicator.Get_failed()
    lost = failed.Get_size() > 0
    failed.Free()
    return lost or communicator.Is_revoked()


def _is_of_a_loss(error: Exception) -> bool:
    """Return whether an error of any kind came of a loss. Not collective."""
    if losses.is_loss(error):
        return True
    # A library may have raised an error of its own in between; and the news may come later.
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        if _has_lost(world.communicator()):
            return True
        time.sleep(0.01)
    return False


def _let_go(error: BaseException | None) -> None:
    """Let frames of the function go, with the wrapper and loaders in them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    gc.collect()


def _all_agree(communicator: MPI.Intracomm, fine: bool) -> bool:
    """Return whether all ranks are fine and none is lost: the same on all. Collective.

    See Note [Agreement after a loss].
    """
    from mpi4py import MPI

    try:
        return bool(communicator.Agree(int(fine)))
    except MPI.Exception:
        return False


def _recover() -> None:
    """Make a new world of the ranks that are left. Collective over those.

    Note [Agreement after a loss]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Some ranks hear of a loss when others have come to the end of what they did, of the function or
    of the making of a world. All must shrink the same communicator, or none. So each of the two
    ends with MPI_Comm_agree, which all ranks that live call, and whose result is the same on all.
    """
    began = time.monotonic()
    timeout: timedelta = getattr(dist.group.WORLD, "timeout", world.DEFAULT_TIMEOUT)
    communicator = world.communicator()
    before = communicator.Get_size()
    _fail_everything()
    while True:
        survivors = communicators.note(communicator.Shrink())
        fine = True
        try:
            world.rebuild(survivors, timeout)
        except Exception as error:
            if not losses.is_loss(error):
                raise
            fine = False
            _fail_everything()
        if _all_agree(survivors, fine):
            break
        communicator = survivors  # another one was lost meanwhile
    survivors.Free()
    _Watch()
    if dist.get_rank() == 0:
        lost = before - dist.get_world_size()
        print(
            f"mpiddp: {lost} of {before} ranks {'was' if lost == 1 else 'were'} lost; the others "
            f"go on after {time.monotonic() - began:.1f} s",
            file=sys.stderr,
            flush=True,
        )

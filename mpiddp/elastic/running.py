"""Call a training function again when ranks were lost or have come."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

import torch.distributed as dist

from mpiddp.elastic import recovery
from mpiddp.elastic.committed import Committed
from mpiddp.mpi import losses, uncaught
from mpiddp.rendezvous import joining, meeting, world

__all__ = ["admit", "grow", "run"]

Training = TypeVar("Training", bound=Callable[..., Any])


# What all ranks wait for beside what the function does.
_END, _ADMIT = "the end of the elastic function", "elastic.admit"


class _MoreRanksWanted(Exception):
    """Leaves the function for a larger world."""

    def __init__(self, count: int, by: str, bring: recovery.Bring) -> None:
        super().__init__(
            f"elastic.{by}() is for a function under elastic.run, whose caller takes this exception"
        )
        self.count, self.bring = count, bring


@overload
def run(function: Training) -> Training: ...


@overload
def run(
    *,
    replace: bool = False,
    min_ranks: int = 1,
    most_losses: int | None = None,
    exceptions_are_losses: bool = False,
) -> Callable[[Training], Training]: ...


def run(
    function: Any = None,
    *,
    replace: bool = False,
    min_ranks: int = 1,
    most_losses: int | None = None,
    exceptions_are_losses: bool = False,
) -> Any:
    """Return `function` so that it goes on when ranks are lost. A decorator.

    What it returns is collective, after `init_process_group`. Before the function is called for
    the first time, the state goes on from a snapshot or checkpoint of an earlier job, if there is
    one. When a rank is lost, the others leave what they wait for with an error, make a new world
    of the ranks that are left, take the state of the rank that has come farthest, and call the
    function again: it wraps the model anew, and makes its groups and its loader.

    Where the MPI ends the job when a rank is lost, it says so once; the next job goes on.

    A process that comes runs the same script from its beginning. So between `init_process_group`
    and this function a script must call nothing collective.

    Args:
        function: takes the `State`, and whatever else.
        replace: whether new processes are started for those that were lost (MPI_Comm_spawn).
            Where the launcher starts none, the others go on without.
        min_ranks: with fewer ranks the job ends.
        most_losses: after so many recoveries the next loss ends the job; None: never.
        exceptions_are_losses: whether an exception of the function on one rank ends that rank
            alone, as if it had been killed, where the MPI can go on without it. The rank prints
            the traceback. By default it ends the job, since the other ranks may be as wrong.

    Raises:
        RuntimeError: too few ranks are left, or there were too many losses.
        Exception: whatever the function raises that is not the loss of a rank.
    """
    if function is None:
        return functools.partial(
            run,
            replace=replace,
            min_ranks=min_ranks,
            most_losses=most_losses,
            exceptions_are_losses=exceptions_are_losses,
        )

    return run_again_after((), function, replace, min_ranks, most_losses, exceptions_are_losses)


def run_again_after(
    errors: tuple[type[Exception], ...],
    function: Callable[..., Any],
    replace: bool = False,
    min_ranks: int = 1,
    most_losses: int | None = None,
    exceptions_are_losses: bool = False,
) -> Any:
    """Return `function` as `run` does; it is called again after some errors, too.

    Collective when it is called. All ranks go back to the last commit, in a new world of the same
    ranks. A rank that has no such error is waited for: its own call has to end, in any way.

    Args:
        errors: the kinds of them.
        function: see `run`, as for the others.
        replace: see `run`.
        min_ranks: see `run`.
        most_losses: see `run`.
        exceptions_are_losses: see `run`.
    """

    @functools.wraps(function)
    def elastic(state: Committed, *args: Any, **kwargs: Any) -> Any:
        _know_waits()
        if losses.can_go_on():
            recovery.Watch()
        elif dist.get_rank() == 0:
            _say(
                f"a rank that is lost ends this job, since {losses.why_not()}. "
                f"{state._after_a_restart()}"
            )
        with contextlib.closing(meeting):
            # Those that were here before do not look for checkpoints again.
            begun = joining.is_joining()
            renewed, times = False, 0
            state._note()
            while True:
                finished, more, result = False, 0, None
                words = ""
                bring: recovery.Bring = joining.bring
                try:
                    if renewed:
                        state._arrive()
                    if begun or not state._resume():
                        state.sync()
                    begun = True
                    if exceptions_are_losses:
                        result = _or_end_this_rank(errors, function, state, *args, **kwargs)
                    else:
                        result = function(state, *args, **kwargs)
                    finished = True
                except _MoreRanksWanted as wanted:
                    more, bring = wanted.count, wanted.bring
                    recovery.let_go(wanted)
                except errors as error:
                    words = f"{type(error).__name__}: {error}"
                    recovery.let_go(error)
                    recovery.end_waits()
                except Exception as error:
                    if not losses.can_go_on() or not recovery.is_of_a_loss(error):
                        raise
                    recovery.let_go(error)
                with world.recorded(_END):
                    lost, again = _meet(finished or more > 0, bool(errors))
                if not again and not more:
                    _clear(state)
                    return result
                state._leave_node()
                if again:
                    state._interrupt()
                times += lost
                if most_losses is not None and times > most_losses:
                    raise RuntimeError(
                        f"rank {dist.get_rank()}: ranks were lost {times} times, more often than "
                        f"most_losses={most_losses}"
                    )
                if again and not lost:
                    _renew_all(state, words)
                else:
                    _renew(state, lost, more, replace, min_ranks, bring)
                _know_waits()
                renewed = True

    return elastic


def grow(count: int) -> None:
    """Leave the function, and call it again with more ranks.

    Collective, at the end of a step, after `State.commit`. Starts processes with this one's command
    (MPI_Comm_spawn); where the launcher starts none, the function goes on with the ranks there are.

    Args:
        count: how many ranks are to come.
    """
    if count < 1:
        raise ValueError(f"count must be 1 or more, not {count}")
    raise _MoreRanksWanted(count, "grow", joining.bring)


def admit(folder: str | Path) -> None:
    """Let a job come that waits at `folder`: leave the function, and call it again with its ranks.

    Collective, at the end of a step, after `State.commit`. While none waits, it is a broadcast of
    some bytes. A job comes by having the folder's name in ``MPIDDP_JOIN``; it runs the same script,
    and its ranks follow those that are here. Whoever can read the folder as this user can come.

    With MPICH. Open MPI does not connect the jobs of two mpiruns: there none comes.

    Args:
        folder: one that rank 0 and the job that comes can see; it is made if it is not there.

    Raises:
        OSError: rank 0 cannot write to the folder.
    """
    with world.recorded(_ADMIT):
        count = meeting.look(Path(folder).absolute(), world.communicator())
    if count:
        raise _MoreRanksWanted(count, "admit", meeting.let_in)


def _know_waits() -> None:
    """Let this rank say of the waits that it has not come to them. Not collective."""
    with contextlib.suppress(RuntimeError):  # of a world that is not mpiddp's
        for name in (_END, _ADMIT):
            world.named_wait(name)


def _meet(fine: bool, after_errors: bool) -> tuple[bool, bool]:
    """Return whether ranks were lost, and whether the function is called again. Collective.

    Args:
        fine: whether this rank has come to the end of the function.
        after_errors: whether ranks may say no without a loss.
    """
    can_go_on, ranks = losses.can_go_on(), world.communicator()
    if not after_errors:
        lost = can_go_on and not losses.agree(ranks, fine)
        return lost, lost
    lost = can_go_on and not losses.agree(ranks, True)
    return lost, not losses.agree(ranks, fine) or lost


def _or_end_this_rank(
    errors: tuple[type[Exception], ...], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Return what the function does; let its exception end this process, unless it is the last."""
    try:
        return function(*args, **kwargs)
    except _MoreRanksWanted:
        raise
    except errors:
        raise
    except Exception as error:
        alone = dist.get_world_size() == 1
        if alone or not losses.can_go_on() or recovery.is_of_a_loss(error):
            raise
        rank = dist.get_rank()
        uncaught.show(error, rank)
        with contextlib.suppress(Exception):
            print(
                f"mpiddp: rank {rank} ends with this exception; the others go on without it",
                file=sys.stderr,
                flush=True,
            )
            sys.stdout.flush()
        # As if it had been killed: to finalise MPI waits for the others.
        os._exit(1)


def _clear(state: Committed) -> None:
    """Remove the snapshots when all ranks have returned, unless the job is to be started again."""
    if not state._has_snapshots or world.is_to_end():
        return
    if not losses.can_go_on() and dist.is_initialized():
        with world.recorded(_END):
            losses.agree(world.communicator(), True)  # else all have said that they have returned
    state._end()


def _renew(
    state: Committed, lost: bool, more: int, replace: bool, min_ranks: int, bring: recovery.Bring
) -> None:
    """Make the new world, and say so. Collective over the ranks that live."""
    began = time.monotonic()
    before = dist.get_world_size()
    wanted = before if lost and replace else 0 if lost else before + more
    number, come = recovery.renew(wanted, lost, state._leave, bring, then=state._after_a_restart())
    if losses.can_go_on():
        recovery.Watch()
    if dist.get_world_size() < min_ranks:
        raise RuntimeError(
            f"rank {dist.get_rank()}: {dist.get_world_size()} of {before} ranks are left, fewer "
            f"than min_ranks={min_ranks}"
        )
    if dist.get_rank() == 0:
        parts = [f"{number} of {before} ranks {_were(number)} lost"] if number else []
        if come:
            parts.append(f"{come} {_have(come)} come")
        elif wanted > before - number:
            parts.append("no more processes have come")
        _say(
            f"{', '.join(parts)}; training goes on with {dist.get_world_size()} after "
            f"{time.monotonic() - began:.1f} s"
        )


def _renew_all(state: Committed, words: str) -> None:
    """Make a new world of the same ranks, and say why. Collective.

    Args:
        state: what is to leave the old world.
        words: what happened to this rank; "" for nothing.
    """
    recovery.renew(0, losses.can_go_on(), state._leave, then=state._after_a_restart())
    if losses.can_go_on():
        recovery.Watch()
    if dist.get_rank() == 0:
        _say(f"{words or 'another rank had an error'}; training goes back to the last commit")


def _say(text: str) -> None:
    print(f"mpiddp: rank 0: {text}", file=sys.stderr, flush=True)


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def _have(count: int) -> str:
    return "has" if count == 1 else "have"

"""Let horovod.run find the ranks started by MPI: what a script gets as the package horovod."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpiddp.runner.started_ranks import StartedRanks

__all__ = ["__version__", "run"]

# Whose interface this is; programs compare it.
__version__ = "0.28.1"

_started: StartedRanks | None = None


def use(started: StartedRanks) -> None:
    """Let `run` call its function on these ranks. Not collective."""
    global _started
    _started = started


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    **options: Any,
) -> list[Any]:
    """Call a function on the ranks that MPI has started, and return what each returned.

    Collective. Where Horovod starts processes, `num_proc` must be the number of ranks. See
    Note [The ranks are there already].

    Args:
        func: called once on each rank.
        args: positional arguments.
        kwargs: arguments by name.
        num_proc: how many processes the script wants.
        options: where and how Horovod would start them; without effect.

    Raises:
        ValueError: MPI has started another number of ranks.
        RuntimeError: the function failed on some rank; or this is no place to start ranks.
    """
    if _started is None or not _started.may_launch():
        raise RuntimeError(
            "horovod.run was called where no ranks can be started: within a function that was "
            "started, after init_process_group or hvd.init, or without python -m mpiddp"
        )
    from mpiddp.horovod import world  # not before a script wants Horovod

    place = _started.place_among(num_proc, "horovod.run")

    def call(*everything: Any) -> Any:
        value = func(*everything[:-1], **everything[-1])
        world.shutdown()  # as the end of a process that Horovod has started does
        return value

    outcome = _started.run(call, place, (*args, dict(kwargs or {})))
    if outcome.failure is not None:
        failure = outcome.failure
        raise RuntimeError(
            f"the function of horovod.run failed on rank {failure.rank}: "
            f"{failure.text or f'exit code {failure.exit_code}'}"
        )
    return list(outcome.values)

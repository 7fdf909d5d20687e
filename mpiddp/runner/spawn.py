"""Let torch.multiprocessing.spawn and start_processes find the ranks started by MPI."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from mpiddp.runner.started_ranks import Failure, Outcome, StartedRanks
from mpiddp.torch_internals.patching import replace_function

__all__ = ["replace_spawn"]


def replace_spawn(started: StartedRanks) -> None:
    """Let every rank call the function that the script wants to start processes for.

    From then on `torch.multiprocessing.spawn` and `start_processes` are collective where
    `started.may_launch()`; elsewhere, and in the processes that they start there, they are
    torch's. See Note [The ranks are there already]. Not collective.

    Args:
        started: this job's ranks.
    """

    def make(torchs: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(torchs)

        def start(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            function, count = given.arguments["fn"], given.arguments["nprocs"]
            if not started.may_launch() or _of_elastic(function):
                return torchs(*args, **kwargs)
            place = started.place_among(count, "torch.multiprocessing.spawn")
            arguments = given.arguments["args"]

            def call(*arguments: Any) -> None:
                function(place.index, *arguments)

            context = _RankContext(started.run(call, place, arguments))
            if not given.arguments["join"]:
                return context
            context.join()
            return None

        return start

    # spawn calls it.
    replace_function(start_processes, make)


def _of_elastic(function: Callable[..., Any]) -> bool:
    """Whether torchelastic starts its workers: it has launched them by other means than ours."""
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.elastic")


@dataclass(frozen=True)
class _RankProcess:
    """What `ProcessContext.processes` holds of a process: it has ended.

    Attributes:
        name: as for the processes of multiprocessing.
        pid: the rank's process.
        exitcode: how its function ended.
    """

    name: str
    pid: int
    exitcode: int

    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float | None = None) -> None:
        pass

    def terminate(self) -> None:
        pass

    kill = close = terminate


class _RankContext(ProcessContext):
    """What ``spawn(join=False)`` returns: the function has ended on all ranks by then."""

    def __init__(self, outcome: Outcome) -> None:
        failure = outcome.failure
        failed = {} if failure is None else {failure.index: failure.exit_code}
        super().__init__([], [])  # type: ignore[no-untyped-call]
        self.processes = [
            _RankProcess(f"SpawnProcess-{index + 1}", process_id, failed.get(index, 0))
            for index, process_id in enumerate(outcome.process_ids)
        ]
        self._failure = failure

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Return True, or raise how the function failed. Not collective.

        Raises:
            ProcessRaisedException: it raised; the message holds the traceback.
            ProcessExitedException: it called sys.exit with another status than 0.
        """
        if self._failure is not None:
            raise _exception(self._failure) from None
        return True


def _exception(failure: Failure) -> ProcessException:
    index, process_id = failure.index, failure.process_id
    if failure.text:
        return ProcessRaisedException(
            f"\n\n-- Process {index} terminated with the following error:\n{failure.text}",
            index,
            process_id,
        )
    return ProcessExitedException(
        f"process {index} terminated with exit code {failure.exit_code}",
        error_index=index,
        error_pid=process_id,
        exit_code=failure.exit_code,
    )

"""Let torchrun's Python interface find the ranks started by MPI.

That is `elastic_launch`, and `main` and `run` of `torch.distributed.run` and
`torch.distributed.launch`, which end in it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpiddp.runner.program import Program
from mpiddp.runner.started_ranks import Failure, Place, StartedRanks
from mpiddp.torch_internals.patching import replace_function

__all__ = ["replace_elastic_launch"]


def replace_elastic_launch(started: StartedRanks) -> None:
    """Let every rank run what the script wants torchelastic to launch.

    From then on `elastic_launch(config, entrypoint)(*args)` is collective where
    `started.may_launch()`. It raises ValueError on all ranks if `config` asks for other ranks than
    MPI has started, or the entry point is a command that is not Python's; ChildFailedError if a
    rank fails and the others end. Nothing is restarted. Not collective.

    Args:
        started: this job's ranks.
    """
    from torch.distributed.elastic.utils.api import macros
    from torch.distributed.launcher import api

    def make(torchs: Callable[..., Any]) -> Callable[..., Any]:
        def launch_agent(
            config: api.LaunchConfig,
            entrypoint: Callable[..., Any] | str | None,
            args: Sequence[Any],
            *more: Any,
            **options: Any,
        ) -> Any:
            if not started.may_launch():
                return torchs(config, entrypoint, args, *more, **options)
            place = _place(started, config)
            function, arguments = _function(entrypoint, args)

            def call(*arguments: Any) -> Any:
                local_rank = str(started.topology.local_rank)
                return function(*macros.substitute(list(arguments), local_rank))

            with _main_restored():
                outcome = started.run(call, place, arguments)
            if outcome.failure is not None:
                raise _error(api._get_entrypoint_name(entrypoint, list(args)), outcome.failure)
            return dict(zip(outcome.ranks, outcome.values, strict=True))

        return launch_agent

    replace_function(api.launch_agent, make)


def _place(started: StartedRanks, config: Any) -> Place:
    """Return this process's place among those of `config` that are started together."""
    topology, count = started.topology, config.nproc_per_node
    if config.max_nodes == 1 and count == topology.world_size:
        return Place(topology.rank, True)
    if (
        config.min_nodes <= topology.node_count <= config.max_nodes
        and count == topology.local_world_size
    ):
        return Place(topology.local_rank, False)
    nodes = str(config.min_nodes)
    if config.max_nodes != config.min_nodes:
        nodes = f"{nodes} to {config.max_nodes}"
    asked = f"{count} processes on each of {nodes} node{'s' * (config.max_nodes > 1)}"
    raise ValueError(started.refusal("torchelastic", asked, count * config.max_nodes))


def _function(
    entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Return what to call for an entry point that is a function or a command, and with what."""
    if callable(entrypoint):
        return entrypoint, args
    pythons = (sys.executable, os.getenv("PYTHON_EXEC", sys.executable))
    rest = [str(arg) for arg in args]
    if entrypoint in pythons or os.path.basename(str(entrypoint)).startswith("python"):
        while rest and rest[0] == "-u":
            rest.pop(0)
        kind = {"-m": "module", "-c": "code"}.get(rest[0] if rest else "", "script")
        if kind != "script":
            rest.pop(0)
        if rest and not (kind == "script" and rest[0].startswith("-")):

            def run(name: str, *following: str) -> None:
                Program(kind, name, following).run()

            return run, rest
    raise ValueError(
        f"torchelastic was asked to start the command {' '.join([str(entrypoint), *rest])}, but "
        f"python -m mpiddp runs only Python scripts and modules, in the processes that MPI started"
    )


@contextlib.contextmanager
def _main_restored() -> Iterator[None]:
    """Put back, at the end, what running a program as __main__ replaces."""
    before, argv, path = sys.modules["__main__"], sys.argv, list(sys.path)
    try:
        yield
    finally:
        sys.modules["__main__"] = before
        sys.argv, sys.path[:] = argv, path


def _error(name: str, failure: Failure) -> Exception:
    """Return torchelastic's error for the rank that failed first."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    told = ProcessFailure(failure.local_rank, failure.process_id, failure.exit_code, "")
    if failure.text:
        told.message = failure.text
    return ChildFailedError(name, {failure.rank: told})

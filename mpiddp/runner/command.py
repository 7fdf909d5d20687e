"""Run a script that was written for torchrun, as it is, on MPI.

mpirun -n 16 python -m mpiddp train.py --epochs 5
mpirun -n 16 mpiddp run train.py --epochs 5
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from torch.distributed import Backend

import mpiddp_children
from mpiddp import launchers, settings
from mpiddp.mpi import communicators, nodes
from mpiddp.rendezvous import absent, children, mpi_world
from mpiddp.runner import (
    agent_store,
    data_parallel,
    elastic,
    launchers_inside,
    output,
    spawn,
    stand_ins,
    torchrun,
    trained_alone,
)
from mpiddp.runner.job_exit import JobExit
from mpiddp.runner.program import Program
from mpiddp.runner.started_ranks import StartedRanks
from mpiddp.torch_internals import backend_names
from mpiddp.version import __version__

_DESCRIPTION = """\
Run a script written for torchrun on MPI, as it is: torch.distributed gets its ranks from MPI, and
DistributedDataParallel is the one of mpiddp. Start it with mpirun or srun.
"""

# How the command is called where it is not told.
NAME = "python -m mpiddp"

# Options that name the program; its own arguments follow.
_KINDS = {"-m": "module", "-c": "code"}


class _UsageError(Exception):
    """What is wrong with the command line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise instead of printing: only rank 0 is to print, and nobody knows its rank yet."""
        raise _UsageError(message)


def main(arguments: Sequence[str], name: str = NAME) -> int:
    """Run what the command line names. Collective over MPI.COMM_WORLD.

    Args:
        arguments: the command line, after the name.
        name: what the user has typed for this command.

    Returns:
        The exit status of this process.
    """
    parser = _make_parser(name)
    problem = ""
    try:
        options, program = _parse(parser, arguments)
    except _UsageError as error:
        problem = str(error)
    else:
        if options.help or options.version:  # without MPI
            if launchers.speaks_for_all():
                print(parser.format_help().rstrip() if options.help else f"mpiddp {__version__}")
            return 0
    everyone = mpi_world.checked_communicator(None)
    limit = settings.START_SECONDS.read_before_init()
    communicator = communicators.duplicate(everyone, limit, name)
    topology = nodes.find_topology(communicator)
    problems = [text for text in communicator.allgather(problem) if text]
    if problems:
        if topology.rank == 0:
            parser.print_usage(sys.stderr)
            print(f"{parser.prog}: error: {problems[0]}", file=sys.stderr)
        return 2
    if not options.data_parallel:  # else the script is alone
        problem = torchrun.set_environment(communicator, topology)
        absent.begin(communicator)
        children.begin(topology.rank, topology.world_size)
    if problem:
        # Without an abort: the others wait at their end until rank 0 has printed.
        if topology.rank == 0:
            print(f"{parser.prog}: {problem}", file=sys.stderr)
        return 2

    ending = JobExit(topology.rank, topology.world_size)
    try:
        _prepare(options, program, StartedRanks(communicator, topology, ending.fail))
        ending.watch_sigterm()
        ending.finish_at_direct_exit()
        if options.data_parallel and topology.rank != 0:
            data_parallel.serve()
        else:
            program.run()
    except SystemExit as exited:
        return ending.exit(exited.code)
    except BaseException as error:
        return ending.fail(error)
    return 0


def _prepare(options: argparse.Namespace, program: Program, started: StartedRanks) -> None:
    topology = started.topology
    output.send_by_line()
    _direct_output(options, topology.rank)
    said = _replace(options, program, started)
    if topology.rank == 0:
        ranks = f"{topology.world_size} rank{'s' * (topology.world_size > 1)}"
        print(f"mpiddp: {ranks}, {said}", file=sys.stderr, flush=True)


def _make_parser(name: str = NAME) -> _Parser:
    parser = _Parser(
        prog=name,
        usage="mpirun -n N %(prog)s [options] (SCRIPT | -m MODULE | -c CODE) [argument ...]",
        description=_DESCRIPTION,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="print this and end")
    parser.add_argument("--version", action="store_true", help="print the version and end")
    parser.add_argument(
        "--backend",
        default=backend_names.BACKEND,
        metavar="NAME",
        help="what init_process_group starts instead of nccl, gloo or torch's other backends "
        "(default: %(default)s); keep: what the script names",
    )
    parser.add_argument(
        "--keep-ddp",
        action="store_true",
        help="leave torch's DistributedDataParallel, with torch's reducer",
    )
    parser.add_argument(
        "--shared-parameters",
        action="store_true",
        help="let the ranks of a node have one copy of the parameters and of the optimizer's "
        "state, which the script's own optimizers step once for all of them; "
        "MPIDDP_SHARED_PARAMETERS=socket: one for each socket",
    )
    parser.add_argument(
        "--data-parallel",
        action="store_true",
        help="run the script on rank 0 only, with DataParallel of mpiddp in place of torch's: it "
        "divides each batch among all ranks",
    )
    parser.add_argument(
        "--keep-spawn",
        action="store_true",
        help="let torch.multiprocessing.spawn and torchelastic start processes, instead of finding "
        "the ranks started",
    )
    parser.add_argument(
        "--tag-output", action="store_true", help='print "[RANK] " before each line'
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="write the output of each rank to DIR/rank-RANK.out and .err; that of rank 0 and "
        "what ends the job are printed as well",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="write to DIR when each rank did what in the first steps, for Perfetto "
        "(MPIDDP_TRACE_STEPS: how many, 100 if it is unset)",
    )
    return parser


def _parse(parser: _Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Program]:
    """Return our options, and the program with its own arguments, which are not parsed."""
    own: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in _KINDS:
        own.append(rest.pop(0))
        if own[-1] in ("--backend", "--log-dir", "--trace") and rest:
            own.append(rest.pop(0))
    options = parser.parse_args(own)
    kind = "script"
    if rest and rest[0] in _KINDS:
        kind = _KINDS[rest.pop(0)]
    if not rest and not (options.help or options.version):
        raise _UsageError(f"the {kind} to run is missing")
    if kind == "script" and rest and not os.path.exists(rest[0]):
        raise _UsageError(f"there is no file {rest[0]!r} on {socket.gethostname()}")
    if options.backend not in (torchrun.KEEP, *Backend.backend_list[1:]):
        raise _UsageError(f"there is no backend {options.backend!r}")
    if backend_names.names_mpiddp(options.backend):
        options.backend = backend_names.BACKEND  # "ccl"
    name, *following = rest or [""]
    return options, Program(kind, name, tuple(following))


def _direct_output(options: argparse.Namespace, rank: int) -> None:
    tag = f"[{rank}] " if options.tag_output else ""
    if options.log_dir is None:
        if tag:
            output.send_tagged(tag)
        return
    options.log_dir.mkdir(parents=True, exist_ok=True)
    files = [options.log_dir / f"rank-{rank}.{kind}" for kind in ("out", "err")]
    if rank == 0:
        output.send_tagged(tag, *files)
    else:
        output.send_to_files(*files)


def _replace(options: argparse.Namespace, program: Program, started: StartedRanks) -> str:
    """Replace the parts of torch that the options name; return in words what was replaced."""
    replaced = []
    if options.trace is not None:
        from mpiddp.tracing.session import follow_world  # which most jobs do not use

        os.environ[settings.TRACE.name] = os.fspath(options.trace.absolute())
        follow_world()
    if options.shared_parameters:
        from mpiddp.optim import adopted  # which most jobs do not use

        if not settings.SHARED_PARAMETERS.read_before_init():
            os.environ[settings.SHARED_PARAMETERS.name] = "1"
        adopted.install()
        replaced.append("each step of an optimizer by parts of it")
    if options.data_parallel:
        replaced.append(data_parallel.start())
        options.backend, options.keep_ddp, options.keep_spawn = torchrun.KEEP, True, True
    if options.backend != torchrun.KEEP:
        torchrun.replace_backends(options.backend)
        replaced.append(f"torch's backends (nccl, gloo, none) by {options.backend}")
        if package := backend_names.installed_ccl():
            replaced.append(f"ccl of {package}, which is installed, by {options.backend}")
    if not options.keep_ddp and options.backend in (torchrun.KEEP, backend_names.BACKEND):
        all_of_mpiddp = options.backend == backend_names.BACKEND
        torchrun.replace_ddp(derived=all_of_mpiddp)
        on = "" if all_of_mpiddp else " on groups of mpiddp"
        replaced.append(f"torch's DistributedDataParallel{on} by mpiddp's")
    if options.backend == backend_names.BACKEND and started.topology.world_size > 1:
        trained_alone.watch()
    if options.backend == backend_names.BACKEND:
        torchrun.replace_sync_batch_norm()
        stand_ins.install(started.topology.rank, started)
        agent_store.serve_on_demand(started.topology)
    if options.backend == backend_names.BACKEND and not options.keep_spawn:
        mpiddp_children.mark(started.topology.rank, started.topology.world_size)
        if started.topology.world_size > 1:
            launchers_inside.watch(program, started.topology.rank)
    if not options.keep_spawn:
        spawn.replace_spawn(started)
        elastic.replace_elastic_launch(started)
    if torchrun.limit_threads(started.topology):
        replaced.append("the unset OMP_NUM_THREADS by 1")
    return f"replaced: {'; '.join(replaced)}" if replaced else "nothing replaced"

"""From a world of MPI ranks to a world of torch.distributed.

Also what must happen when it ends: on request, at interpreter exit, or because a
rank failed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from mpiddp import forks, launch_checks, settings, uncaught
from mpiddp.completion import Completion
from mpiddp.lazy_store import LazyStore
from mpiddp.library_check import check_loaded_library

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.process_group import ProcessGroup
    from mpiddp.requests import Requests
    from mpiddp.roll_call import RollCall

BACKEND = "mpiddp"
DEFAULT_TIMEOUT = timedelta(minutes=30)

# What launchers tell a process about the number of ranks they started.
_LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# SLURM says this to every process of an allocation, whoever started it.
_SCHEDULER_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


@dataclass(frozen=True)
class Topology:
    """Where this process stands among the ranks and the nodes.

    Attributes:
        rank: rank in the world, from 0.
        world_size: number of ranks.
        local_rank: rank among the ranks that share this node's memory.
        local_world_size: number of those.
        node_rank: number of this node, in order of the nodes' lowest ranks.
        node_count: number of nodes.
        local_core_count: number of cores that the ranks of this node may run on, together.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_count: int
    local_core_count: int = field(default=1, compare=False)

    @property
    def crowded(self) -> bool:
        """Whether this node has fewer cores than ranks. Not collective."""
        return self.local_core_count < self.local_world_size

    def as_environment(self) -> dict[str, str]:
        """Return torchrun's environment variables for this process. Not collective."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.node_count),
        }


@dataclass
class _World:
    """What init_process_group made and destroy_process_group takes apart."""

    communicator: MPI.Intracomm
    requests: Requests
    completion: Completion
    roll_call: RollCall
    topology: Topology
    environment: dict[str, str]
    process_id: int
    store: LazyStore | None = None
    started: bool = False
    groups: list[weakref.ref[ProcessGroup]] = field(default_factory=list)


_world: _World | None = None

# Seconds that a rank which cannot start waits for all others to say the same, and between looks.
_PATIENCE = 5.0
_NAP = 0.001


def init_process_group(
    comm: MPI.Intracomm | None = None, timeout: timedelta = DEFAULT_TIMEOUT
) -> None:
    """Initialise torch.distributed on the ranks of an MPI communicator.

    Collective over `comm`. Initialises MPI if nobody has, duplicates `comm`, and sets torchrun's
    variables RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE where
    they are unset. From here on an uncaught exception on any rank ends the whole job.

    Args:
        comm: any mpi4py intracommunicator; its ranks become torch.distributed's ranks. None is
            ``MPI.COMM_WORLD``. Without mpirun that is a world of one.
        timeout: how long a collective waits for other ranks before it raises.

    Raises:
        ImportError: mpi4py runs on another MPI than mpiddp was compiled against.
        TypeError: an argument is of the wrong type.
        ValueError: `comm` is null or an intercommunicator, or `timeout` is not positive; or an
            environment variable of mpiddp is wrong on some rank.
        RuntimeError: it was called before; the MPI gives less than THREAD_MULTIPLE; every process
            is a world of one although the launcher started several; or the ranks differ in a
            setting or a version that must be the same.
    """
    uncaught.watch_if_initialised()
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, not {type(timeout).__name__}")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, not {timeout}")
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialised already; call destroy_process_group() first"
        )

    def start(communicator: MPI.Intracomm, topology: Topology) -> None:
        dist.init_process_group(
            BACKEND,
            store=shared_store(communicator, topology, timeout),
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timeout,
        )

    begin_world(comm, start)


def begin_world(
    comm: MPI.Intracomm | None, start: Callable[[MPI.Intracomm, Topology], None]
) -> None:
    """Make what lies under torch.distributed, and let `start` initialise that.

    Collective over `comm`. An exception that not all ranks raise ends the job, unless it comes
    before the first message; then it does so when nobody catches it.

    Args:
        comm: as for `init_process_group`.
        start: called with a duplicate of `comm` and this process's place in it; it must
            initialise torch.distributed.
    """
    forks.check("init_process_group")
    # Left over if torch.distributed.destroy_process_group() was called instead of ours.
    _leave_world()
    own = checked_communicator(comm).Dup()
    uncaught.watch(own.Get_rank(), own.Get_size())
    try:
        with uncaught.paused():  # torch's own hook only adds the rank to the traceback
            _make_world(own)
            start(own, get_topology())
    except BaseException as error:
        _end_unless_all_fail(own, error)
        if _world is None:
            own.Free()
        _leave_world()
        raise
    assert _world is not None
    _world.started = True
    atexit.register(_stop_at_exit)


def _make_world(own: MPI.Intracomm) -> None:
    """Make what one process has of the world. Collective over `own`, which the world then owns."""
    global _world
    from mpiddp.engine import Engine
    from mpiddp.requests import Requests
    from mpiddp.roll_call import RollCall

    launch_checks.compare_settings(own, _check_thread_level)
    threaded = _progress_thread_wanted()
    topology = find_topology(own)
    forks.claim(topology.rank, topology.world_size)
    environment = {
        name: value for name, value in topology.as_environment().items() if name not in os.environ
    }
    requests = Requests(Engine(threaded=threaded), crowded=topology.crowded)
    _world = _World(
        own,
        requests,
        Completion(requests),
        RollCall(own, threaded),
        topology,
        environment,
        os.getpid(),
    )
    os.environ.update(environment)


def _end_unless_all_fail(communicator: MPI.Intracomm, error: BaseException) -> None:
    """End the job if only some ranks have failed in it: the others wait for them, or soon will.

    Collective where all have. Then each raises its own error, and may begin again.
    """
    from mpi4py import MPI

    if communicator.Get_size() == 1:
        return
    with contextlib.suppress(MPI.Exception):
        if isinstance(error, Exception) and _all_are_here(communicator):  # not Ctrl-C
            return
    uncaught.end_job(error)


def _all_are_here(communicator: MPI.Intracomm) -> bool:
    """Return whether all ranks call this within some seconds. Collective if they do.

    By messages: the others may be in a collective, whose messages Open MPI takes for a barrier's.
    """
    from mpi4py import MPI

    nothing = [bytearray(), MPI.BYTE]
    others = range(1, communicator.Get_size()) if communicator.Get_rank() == 0 else [0]
    deadline = time.monotonic() + _PATIENCE

    def ended(requests: list[MPI.Request]) -> bool:
        while not MPI.Request.Testall(requests):
            if time.monotonic() > deadline:
                return False
            time.sleep(_NAP)
        return True

    def send() -> bool:
        return ended([communicator.Isend(nothing, rank) for rank in others])

    def receive() -> bool:
        return ended([communicator.Irecv(nothing, rank) for rank in others])

    return receive() and send() if communicator.Get_rank() == 0 else send() and receive()


def is_starting() -> bool:
    """Return whether `begin_world` is at work. Not collective."""
    return _world is not None and not _world.started


def destroy_process_group() -> None:
    """Free what init_process_group made. MPI itself stays initialised.

    Collective. In a forked process it only forgets the process group.

    Raises:
        RuntimeError: there is no process group of mpiddp.
    """
    if _world is None:
        raise RuntimeError("mpiddp.init_process_group() has not been called")
    if dist.is_initialized():
        dist.destroy_process_group()
    _leave_world()


def get_topology() -> Topology:
    """Return where this process stands among ranks and nodes. Not collective.

    Raises:
        RuntimeError: init_process_group has not been called.
    """
    if _world is None:
        raise RuntimeError("the topology is known after mpiddp.init_process_group()")
    return _world.topology


def create_process_group(options: Any, backend_options: Any = None) -> ProcessGroup:
    """Make the process group that torch.distributed asks for, as its registered creator.

    Collective over the ranks of the new group.
    """
    from mpiddp.process_group import ProcessGroup

    forks.check("new_group")
    if _world is None:
        raise RuntimeError(
            "a group of mpiddp needs a world of mpiddp: start with mpiddp.init_process_group() "
            'or torch.distributed.init_process_group("mpiddp")'
        )
    world = _world.communicator
    ranks = list(options.global_ranks_in_group)
    if ranks and ranks != list(range(world.Get_size())):
        everyone = world.Get_group()
        group = everyone.Incl(ranks)
        communicator = world.Create_group(group)
        group.Free()
        everyone.Free()
    else:
        communicator = world.Dup()
    try:
        launch_checks.compare_debug_levels(communicator, ranks or range(world.Get_size()))
    except RuntimeError:
        communicator.Free()
        raise
    made = ProcessGroup(
        communicator, _world.requests, _world.completion, options.timeout, options.store
    )
    made.roll_call = _world.roll_call
    made.world_ranks = tuple(ranks or range(world.Get_size()))
    _world.roll_call.add(made)
    _world.groups.append(weakref.ref(made))
    return made


def checked_communicator(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """Initialise MPI if nobody has, and return `comm`, or COMM_WORLD for None.

    Collective where MPI is not initialised. Raises what `init_process_group` raises.
    """
    from mpi4py import MPI

    check_loaded_library()
    if not MPI.Is_initialized():
        # The user asked mpi4py not to, by mpi4py.rc; then ending it falls to us as well.
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        # Registered before _stop_at_exit, so it runs after that.
        atexit.register(MPI.Finalize)
    if MPI.Is_finalized():
        raise RuntimeError("MPI has been finalised; it cannot be initialised twice")
    uncaught.watch_if_initialised()
    if comm is None:
        _refuse_separate_worlds(MPI.COMM_WORLD.Get_size())
        return MPI.COMM_WORLD
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"comm must be an mpi4py communicator, not {type(comm).__name__}")
    if comm == MPI.COMM_NULL:
        raise ValueError("comm is MPI.COMM_NULL: this process is not in the communicator")
    if not isinstance(comm, MPI.Intracomm):
        raise ValueError("comm is an intercommunicator; merge it first (Intercomm.Merge)")
    return comm


def _progress_thread_wanted() -> bool:
    return settings.PROGRESS_THREAD.read() is not False


def _check_thread_level() -> None:
    from mpi4py import MPI

    names = {
        MPI.THREAD_SINGLE: "THREAD_SINGLE",
        MPI.THREAD_FUNNELED: "THREAD_FUNNELED",
        MPI.THREAD_SERIALIZED: "THREAD_SERIALIZED",
        MPI.THREAD_MULTIPLE: "THREAD_MULTIPLE",
    }
    needed = MPI.THREAD_MULTIPLE if _progress_thread_wanted() else MPI.THREAD_SERIALIZED
    provided = MPI.Query_thread()
    if provided < needed:
        raise RuntimeError(
            f"MPI was initialised with {names[provided]}, but mpiddp needs {names[needed]}. If "
            f"your program initialises MPI, let it ask for MPI_THREAD_MULTIPLE (mpi4py does so "
            f"unless mpi4py.rc.thread_level says otherwise). If this MPI has no "
            f"MPI_THREAD_MULTIPLE, set {settings.PROGRESS_THREAD.name}=0: MPI_THREAD_SERIALIZED is "
            f"enough then."
        )


def _refuse_separate_worlds(world_size: int) -> None:
    """Raise if a launcher started several ranks that do not see each other."""
    launched = [name for name in _LAUNCHER_SIZES if name in os.environ]
    told = launched or [name for name in _SCHEDULER_SIZES if name in os.environ]
    name = told[0] if told else ""
    value = os.environ.get(name, "1")
    if world_size > 1 or not value.isdigit() or int(value) <= 1:
        return
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    raise RuntimeError(
        f"this process is rank 0 of 1, although {name}={value}: each process would train a "
        f"model of its own. The launcher and the MPI library do not fit: mpi4py runs on "
        f"{vendor} {'.'.join(map(str, version))}. Use the mpirun of that MPI (with the PyPI "
        f"wheels: the one beside {sys.executable}), or srun with its plugin (Open MPI 5: "
        f"srun --mpi=pmix; MPICH: srun --mpi=pmi2). If a world of one is what you want, say "
        f"so: init_process_group(comm=MPI.COMM_SELF)."
    )


def find_topology(communicator: MPI.Intracomm) -> Topology:
    """Return where this process stands among ranks and nodes. Collective over `communicator`."""
    from mpi4py import MPI

    rank = communicator.Get_rank()
    node = communicator.Split_type(MPI.COMM_TYPE_SHARED, key=rank)
    try:
        lowest_rank_here = node.allreduce(rank, op=MPI.MIN)
        lowest_ranks = sorted(set(communicator.allgather(lowest_rank_here)))
        return Topology(
            rank=rank,
            world_size=communicator.Get_size(),
            local_rank=node.Get_rank(),
            local_world_size=node.Get_size(),
            node_rank=lowest_ranks.index(lowest_rank_here),
            node_count=len(lowest_ranks),
            local_core_count=len(set().union(*node.allgather(os.sched_getaffinity(0)))),
        )
    finally:
        node.Free()


def shared_store(communicator: MPI.Intracomm, topology: Topology, timeout: timedelta) -> Store:
    """Return a store that all ranks share, for groups of other backends.

    Collective over `communicator`.
    """
    assert _world is not None
    _world.store = LazyStore(communicator, topology.node_count == 1, timeout)
    return _world.store


def _leave_world() -> None:
    global _world
    world, _world = _world, None
    if world is None:
        return
    if world.started:
        uncaught.unwatch()
    atexit.unregister(_stop_at_exit)
    if forks.forked():
        return  # the threads are not here, and MPI is the parent's
    world.completion.stop()
    world.requests.engine.stop()
    world.roll_call.free()
    if world.store is not None:
        world.store.close()
    world.communicator.Free()
    for name, value in world.environment.items():
        if os.environ.get(name) == value:  # else it is the user's by now
            del os.environ[name]


def _stop_at_exit() -> None:
    """End without destroy_process_group: stop the thread, let mpi4py finalise MPI.

    Nothing collective happens here, since the other ranks may be anywhere. torch's registry
    must let go of the groups while there is an interpreter for their destructors.
    """
    if _world is None or _world.process_id != os.getpid():
        return
    uncaught.check_end()
    uncaught.unwatch()  # threads that go on may meet what is stopped here
    _world.completion.stop()
    _world.requests.engine.stop()
    _world.roll_call.stop()
    for reference in _world.groups:
        group = reference()
        if group is not None:
            group.forget_communicators()
    if dist.is_initialized():
        dist.destroy_process_group()
    if _world.store is not None:
        _world.store.close()

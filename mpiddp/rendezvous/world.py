"""Make a world of torch.distributed from a world of MPI ranks, and end it.

It ends on request, at interpreter exit, or because a rank failed.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from mpiddp.engine import forks
from mpiddp.flight_recorder import files, page
from mpiddp.flight_recorder.trigger import Trigger
from mpiddp.mpi import at_end, communicators, losses, uncaught
from mpiddp.mpi.nodes import Topology, find_topology
from mpiddp.process_group import asked_backend
from mpiddp.process_group.futures import FutureCompleter
from mpiddp.rendezvous import absent, joining, launch_checks, worlds_apart
from mpiddp.rendezvous.companion import Companion, world_has_begun
from mpiddp.rendezvous.failing import end_unless_all_fail
from mpiddp.rendezvous.mpi_world import (
    _check_thread_level,
    _make_requests,
    _progress_thread_wanted,
    checked_communicator,
)
from mpiddp.rendezvous.store import LazyStore, give_queues
from mpiddp.system import cores
from mpiddp.torch_internals.backend_names import BACKEND
from mpiddp.torch_internals.versions import warn_of_newer_torch
from mpiddp.watch.forming_group import FormingGroup, NamedWait

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.engine.requests import Requests
    from mpiddp.process_group.call_table import CallTable
    from mpiddp.process_group.group import ProcessGroup
    from mpiddp.watch.dead_peers import DeadPeers
    from mpiddp.watch.heartbeat import Heartbeat
    from mpiddp.watch.loss_watch import LossWatch
    from mpiddp.watch.roll_call import RollCall

DEFAULT_TIMEOUT = timedelta(minutes=30)


@dataclass
class _World:
    """What init_process_group made and destroy_process_group takes apart."""

    communicator: MPI.Intracomm
    requests: Requests
    completion: FutureCompleter
    roll_call: RollCall
    dead_peers: DeadPeers
    heartbeat: Heartbeat
    loss_watch: LossWatch
    trigger: Trigger
    topology: Topology
    environment: dict[str, str]
    process_id: int  # -1: it has been stopped, and MPI may be finalised
    timeout: timedelta = DEFAULT_TIMEOUT
    store: LazyStore | None = None
    started: bool = False
    groups: list[weakref.ref[ProcessGroup]] = field(default_factory=list)
    # Where calls of collectives are compared; None where the node gives no such memory.
    call_table: CallTable | None = None
    companions: list[Companion] = field(default_factory=list)
    waits: dict[str, NamedWait] = field(default_factory=dict)


_world: _World | None = None


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
        ImportError: a second MPI library was loaded in this process.
        TypeError: an argument is of the wrong type.
        ValueError: `comm` is null or an intercommunicator, or `timeout` is not positive; or on some
            rank a variable of mpiddp is wrong, or, without `comm`, RANK or WORLD_SIZE.
        RuntimeError: it was called before; the MPI gives less than THREAD_MULTIPLE; processes would
            be worlds apart; or the ranks differ in a setting or a version.
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
        if comm is None and not joining.is_joining():
            worlds_apart.refuse_contradictions(communicator, topology, {})
        store = shared_store(communicator, topology, timeout)
        size, rank = topology.world_size, topology.rank
        dist.init_process_group(BACKEND, None, timeout, size, rank, store)

    asked_backend.note(None)
    begin_world(comm, start, timeout)


def begin_world(
    comm: MPI.Intracomm | None,
    start: Callable[[MPI.Intracomm, Topology], None],
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> None:
    """Make the world under torch.distributed, and let `start` initialise torch.distributed.

    Collective over `comm`. An exception that only some ranks raise ends the job. If it comes
    before the first message, it does so only if nobody catches it.

    Args:
        comm: as for `init_process_group`.
        start: called with a duplicate of `comm` and this process's place in it; it must
            initialise torch.distributed.
        timeout: how long to wait for the other ranks to call it.
    """
    forks.check("init_process_group")
    # Left over if torch.distributed.destroy_process_group() was called instead of ours.
    _leave_world()
    ranks = checked_communicator(comm)
    if comm is None and joining.folder_to_join() is not None:
        ranks = _come(ranks, timeout)
    own = absent.duplicate(ranks, timeout)
    uncaught.watch(own.Get_rank(), own.Get_size())
    try:
        with uncaught.paused():  # torch's own hook only adds the rank to the traceback
            if own.Get_rank() == 0:
                warn_of_newer_torch()
            _make_world(own)
            start(own, get_topology())
            give_queues()
    except BaseException as error:
        joining.settle(error)
        end_unless_all_fail(own, error)
        if _world is None:
            own.Free()
        _leave_world(lost=losses.is_loss(error))
        raise
    assert _world is not None
    joining.settle(None)
    _world.timeout = timeout
    _world.started = True
    at_end.register(_stop_at_exit)
    world_has_begun()


def _come(ranks: MPI.Intracomm, timeout: timedelta) -> MPI.Intracomm:
    """Return the communicator of the job that MPIDDP_JOIN names, and of these ranks.

    Collective over `ranks`, and with the others. Where only some of `ranks` have the variable, the
    steps until the comparison are those of begin_world, in which the others are.
    """
    own = absent.duplicate(ranks, timeout)
    uncaught.watch(own.Get_rank(), own.Get_size())
    try:
        folder = joining.folder_to_join()
        launch_checks.compare_settings(own, _check_thread_level, folder)
    except Exception as error:
        end_unless_all_fail(own, error)
        own.Free()
        raise
    try:
        return joining.communicator(own)
    finally:
        own.Free()


def _make_world(own: MPI.Intracomm) -> None:
    """Make this process's part of the world. Collective over `own`, which the world then owns."""
    global _world
    from mpiddp.process_group.call_pages import make_call_table
    from mpiddp.watch.dead_peers import DeadPeers
    from mpiddp.watch.heartbeat import Heartbeat
    from mpiddp.watch.loss_watch import Asker, LossWatch
    from mpiddp.watch.roll_call import RollCall
    from mpiddp.watch.watchdog import Watchdog

    launch_checks.compare_settings(own, _check_thread_level)
    threaded = _progress_thread_wanted()
    topology = find_topology(own, cores.available())
    forks.claim(topology.rank, topology.world_size)
    environment = {
        name: value for name, value in topology.as_environment().items() if name not in os.environ
    }
    files.begin(own.bcast(files.job_name()), topology.rank, topology.world_size)
    requests = _make_requests(topology, threaded)
    roll_call = RollCall(own, threaded)
    Watchdog(roll_call)
    dead_peers = DeadPeers(own, roll_call.lost)
    heartbeat = Heartbeat(own, roll_call, Asker(roll_call).answers)
    dead_peers.call_on_end(heartbeat.say_nothing)
    loss_watch = LossWatch(topology.rank, roll_call, [dead_peers.look, heartbeat.look])
    _world = _World(
        own,
        requests,
        FutureCompleter(requests),
        roll_call,
        dead_peers,
        heartbeat,
        loss_watch,
        Trigger(),
        topology,
        environment,
        os.getpid(),
        call_table=make_call_table(own, requests),
    )
    os.environ.update(environment)


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


def heartbeat_problem() -> str:
    """Return why nodes do not watch each other, on the first rank of each; "" where they do.

    Not collective.
    """
    return "" if _world is None else _world.heartbeat.problem


def add_companion(companion: Companion) -> None:
    """Let `companion` live as long as the world. Not collective."""
    if _world is None:
        raise RuntimeError("there is a world after mpiddp.init_process_group()")
    _world.companions.append(companion)
    _world.roll_call.watches.append(companion.look)


def remove_companion(companion: Companion) -> None:
    """Take back `add_companion`. Not collective."""
    if _world is not None:
        _world.companions.remove(companion)
        _world.roll_call.watches.remove(companion.look)


def is_to_end() -> bool:
    """Return whether the job's end was announced: the same on all ranks. Collective."""
    return _world is not None and any(each.requested() for each in _world.companions)


def communicator() -> MPI.Intracomm:
    """Return the world's communicator, to be duplicated. Not collective.

    Raises:
        RuntimeError: init_process_group has not been called.
    """
    if _world is None:
        raise RuntimeError("call mpiddp.init_process_group() first")
    return _world.communicator


def named_wait(name: str) -> NamedWait:
    """Return a wait of all ranks for each other, which roll call and watchdog know from now on.

    Not collective. For what is no operation of a process group.

    Args:
        name: what it is, in words; the same on all ranks, and one of few.

    Raises:
        RuntimeError: init_process_group has not been called.
    """
    ranks = communicator()
    assert _world is not None
    if name not in _world.waits:
        wait = NamedWait(name, ranks.Get_size(), ranks.Get_rank(), _world.timeout)
        _world.waits[name] = wait
        _world.roll_call.add(wait)
    return _world.waits[name]


def recorded(name: str) -> AbstractContextManager[None]:
    """Let the watchdog see what runs within as one wait of that name, see `named_wait`. Collective.

    After the world's time limit the job ends; without the progress thread only if it is waited for
    in a way that looks, as `Pending.wait` does: no call of MPI that blocks.
    """
    if _world is None:
        return nullcontext()
    wait = named_wait(name)
    wait.enter()
    return wait.recorded()


def wait_for(request: MPI.Request, call: str, *memory: object) -> None:
    """Wait for what `call` of MPI has begun in the world, in a way that looks. Not collective."""
    from mpiddp.engine.requests import Pending

    assert _world is not None
    Pending(_world.requests, request, _world.communicator, call, memory).wait(float("inf"))


def create_process_group(options: Any, backend_options: Any = None) -> ProcessGroup:
    """Make the process group that torch.distributed asks for, as its registered creator.

    Collective over the ranks of the new group.
    """
    from mpiddp.process_group.call_pages import share_page
    from mpiddp.process_group.group import ProcessGroup

    forks.check("new_group")
    if _world is None:
        raise RuntimeError(
            "a group of mpiddp needs a world of mpiddp: start with mpiddp.init_process_group() "
            'or torch.distributed.init_process_group("mpiddp")'
        )
    world = _world.communicator
    ranks = list(options.global_ranks_in_group) or list(range(world.Get_size()))
    own = ranks.index(world.Get_rank())
    forming = FormingGroup(options.group_id, ranks, own, options.timeout)
    _world.roll_call.add(forming)
    with forming.recorded():
        if len(ranks) == world.Get_size() and ranks == sorted(ranks):
            communicator = world.Dup()
        else:
            everyone = world.Get_group()
            group = everyone.Incl(ranks)
            communicator = world.Create_group(group)
            group.Free()
            everyone.Free()
        try:
            launch_checks.compare_debug_levels(communicator, ranks)
        except RuntimeError:
            communicator.Free()
            raise
    made = ProcessGroup(
        communicator, _world.requests, _world.completion, options.timeout, options.store
    )
    made.roll_call = _world.roll_call
    made.world_ranks = tuple(ranks)
    share_page(made, _world.call_table, communicator, ranks)
    _world.roll_call.add(made)
    _world.groups.append(weakref.ref(made))
    return made


def shared_store(communicator: MPI.Intracomm, topology: Topology, timeout: timedelta) -> Store:
    """Return a store that all ranks share, for groups of other backends.

    Collective over `communicator`.
    """
    assert _world is not None
    _world.store = LazyStore(communicator, topology.node_count == 1, timeout)
    return _world.store


def rebuild(survivors: MPI.Intracomm, timeout: timedelta) -> None:
    """Leave a world that has lost ranks, and begin one of the ranks that are left.

    Collective over `survivors`, whose ranks the new world has.

    Args:
        survivors: of the ranks that are left; MPI has ended what was under way in the old world.
        timeout: see `init_process_group`.

    Raises:
        MPI.Exception, MPIError: another rank was lost meanwhile.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    _leave_world(lost=True)
    init_process_group(survivors, timeout)


def fail_what_is_under_way(code: int) -> None:
    """Let every wait of this process for other ranks fail with an MPI error. Not collective."""
    communicators.revoke_all()
    if _world is not None:
        _world.requests.engine.fail_channels(code)


def on_loss(function: Callable[[], None]) -> None:
    """Call `function`, in a thread, instead of ending the job when a rank has died.

    Not collective.
    """
    assert _world is not None
    _world.dead_peers.on_loss = function
    _world.heartbeat.on_loss = function


def _leave_world(lost: bool = False) -> None:
    """Take the world apart. Collective unless ranks are lost."""
    global _world
    world, _world = _world, None
    if world is None:
        return
    if world.started:
        uncaught.unwatch()
    at_end.unregister(_stop_at_exit)
    if forks.forked() or world.process_id < 0:
        return  # the threads are not here, and MPI is the parent's, or over
    for companion in list(world.companions):
        companion.leave() if lost else companion.end()
    world.completion.stop()
    world.requests.engine.stop()
    page.leave()
    world.loss_watch.stop()
    world.roll_call.free()
    world.dead_peers.close()
    world.heartbeat.close()
    world.trigger.stop()
    if world.store is not None:
        world.store.close()
    communicators.free(world.communicator)
    for name, value in world.environment.items():
        if os.environ.get(name) == value:  # else it is the user's by now
            del os.environ[name]


def _stop_at_exit() -> None:
    """End without destroy_process_group: stop the thread, let mpi4py finalise MPI.

    Nothing here is collective: the other ranks may be anywhere. Groups must go before Python does.
    """
    if _world is None or _world.process_id != os.getpid():
        return
    _world.process_id = -1
    uncaught.check_end(at_last=True)
    uncaught.unwatch()  # threads that still run may meet what is stopped here
    for reference in _world.groups:
        group = reference()
        if group is not None:
            group.forget_communicators()
    for companion in _world.companions:
        companion.leave()
    _world.completion.stop()
    _world.requests.engine.stop()
    page.leave()
    _world.loss_watch.stop()
    _world.roll_call.stop()
    _world.heartbeat.close()
    _world.trigger.stop()
    left = [words for each in _world.companions if (words := str(each))]
    if dist.is_initialized():  # torch's own function counts as an end
        left.insert(0, "mpiddp.destroy_process_group() has not been called")
        dist.destroy_process_group()
    if _world.store is not None:
        _world.store.close()
    if left:
        # The last thing here: where warnings are errors, it raises.
        words = f"rank {_world.topology.rank}: {'; '.join(left)}"
        warnings.warn(words, ResourceWarning, stacklevel=2)

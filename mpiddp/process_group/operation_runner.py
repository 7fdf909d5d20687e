"""Start a process group's operations, wait for them, and keep track of those under way.

It does not know the individual operations: `mpiddp.process_group.group` defines torch's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, cast

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch._C._distributed_c10d import Work as TorchWork

from mpiddp.collectives import ways
from mpiddp.collectives.group_lanes import GroupLanes
from mpiddp.collectives.group_memory import GroupMemory, MemoryPending
from mpiddp.collectives.operation import Operation, SentBlock
from mpiddp.engine import forks
from mpiddp.engine.engine import Engine
from mpiddp.engine.requests import Pending, Requests
from mpiddp.flight_recorder import ring, sources
from mpiddp.flight_recorder.call_text import Call as RecordedCall
from mpiddp.flight_recorder.call_text import call_of
from mpiddp.mpi import communicators, uncaught
from mpiddp.mpi.blocks import Block
from mpiddp.process_group import call_check, dispatch_modes, gpu_tensors, under_way
from mpiddp.process_group.call_blocks import Call
from mpiddp.process_group.futures import FutureCompleter
from mpiddp.process_group.gpu_tensors import GpuWork
from mpiddp.process_group.group_state import GroupState
from mpiddp.process_group.operation_errors import OperationErrors
from mpiddp.process_group.ordered_starts import kept
from mpiddp.process_group.under_way import UnderWay, noted
from mpiddp.process_group.work import COMPLETED, CompletedWork, Work, each_of, limit_of
from mpiddp.system import running_time
from mpiddp.torch_internals.compiler import skip_compilation
from mpiddp.torch_internals.profiling import Event
from mpiddp.watch.roll_call import RollCall
from mpiddp.watch.watchdog import ended_with_block, limited
from mpiddp.watch.wrapped_modules import WrappedModules

# Seconds within which most operations end: until then their time limit is not even looked at.
_SHORT = 5e-3


@skip_compilation
class OperationRunner(OperationErrors):
    """The ranks of one communicator, and their operations.

    Collective over `communicator`.

    Args:
        communicator: an mpi4py intracommunicator that this group owns and frees.
        requests: those of the process.
        completion: completes the futures of the process.
        timeout: how long an operation may wait for other ranks.
    """

    closed = False  # by `shutdown`

    def __init__(
        self,
        communicator: MPI.Intracomm,
        requests: Requests,
        completion: FutureCompleter,
        timeout: timedelta,
    ) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())  # type: ignore[call-arg]
        self._rank, self._size = communicator.Get_rank(), communicator.Get_size()
        self._communicator = communicator
        # What `GroupState.enter` is to compare before a collective's first call of MPI.
        self._uncompared: Call | None = None
        # Of the collective that is being started: its block, if the data follows later, and until
        # when it may last, if its block took long.
        self._ahead: SentBlock | None = None
        self._until = 0.0
        self.state = GroupState(self)
        self.engine: Engine = requests.engine
        self.completion = completion
        self.timeout: timedelta = timeout
        # How many collectives this rank has called, and the last: for the roll call.
        self.entered = 0
        self.last: RecordedCall | None = None
        self.roll_call: RollCall | None = None
        # What the flight recorder calls this group, its modules and its messages.
        self.source = sources.add(sources.Source("", range(self.size())))
        self._messages = sources.Messages(self.source, self._rank)
        self.modules = WrappedModules(self.source)
        self.requests = requests
        # MPI wants one thread at a time to start operations on a communicator.
        self.starting = threading.Lock()
        # Records whose calls of MPI wait without a limit: the watchdog ends the job instead.
        self.without_limit: set[int] = set()
        self.under_way = UnderWay()
        self._together: list[Work] | None = None
        # As torch wraps other backends: if the debug level was set before the group was made.
        self._checked = get_debug_level() == DebugLevel.DETAIL
        self._name = ""
        communicators.note(communicator)
        communicator.Set_name("mpiddp")

    # Called many times per operation; torch's own take two microseconds each.

    def rank(self) -> int:
        """Return this rank's number in the group. Not collective."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in the group. Not collective."""
        return self._size

    @property
    def communicator(self) -> MPI.Intracomm:
        """The group's; before a collective's first call of MPI here, calls are compared."""
        if self._uncompared is not None:
            self._compare()
        return self._communicator if self._ahead is None else kept(self._communicator)

    @property
    def memory(self) -> GroupMemory:
        """The group's, where it has one; before a collective begins there, calls are compared."""
        if self._uncompared is not None:
            self._compare()
        assert self.state.memory is not None
        return self.state.memory

    @property
    def lanes(self) -> GroupLanes:
        """The group's, where it has some; before a collective begins there, calls are compared."""
        if self._uncompared is not None:
            self._compare()
        assert self.state.lanes is not None
        self.state.lanes.later = self._ahead is not None
        return self.state.lanes

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch has a type of its own
        """The name that torch.distributed gave to this group."""
        return self._name

    @property
    def world_ranks(self) -> Sequence[int]:
        """The world rank of each of the group's ranks."""
        return self.source.ranks

    @world_ranks.setter
    def world_ranks(self, ranks: Sequence[int]) -> None:
        self.source.ranks = ranks

    def _set_group_name(self, name: str) -> None:
        self._name = name
        sources.rename(self.source, name)

    def _set_group_desc(self, description: str) -> None:
        super()._set_group_desc(description)
        self.source.description = description

    def shutdown(self) -> None:
        """Free the group's communicator. Collective; harmless twice, and in a forked child."""
        if forks.forked():
            return
        self.closed = True
        self.under_way.end()
        self.state.refuse_calls()
        self.under_way.end_calls()
        if self.under_way.has_abandoned:  # MPI may use its communicators as well, until the end
            self.forget_communicators()
        self.state.end(self.starting, under_way.LAST)
        if self._communicator != MPI.COMM_NULL:
            communicators.free(self._communicator)

    def forget_communicators(self) -> None:
        """End what ends soon; then make shutdown free nothing, at an exit. Not collective."""
        self.under_way.end()
        self._communicator = MPI.Intracomm()
        if self.state.blocks is not None:
            self.state.blocks.forget_communicator()
        if self.state.lanes is not None:
            self.state.lanes.forget_communicators()

    # Several operations as one.

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """Collect what is started from now on into one Work. Not collective."""
        self._together = []

    def _end_coalescing(self, device: torch.device | None = None) -> TorchWork:
        """Return a Work of all that was started since `_start_coalescing`. Not collective."""
        together, self._together = self._together or [], None
        operation = each_of(together)
        pending = next(operation)
        assert isinstance(pending, list)
        number = max((work.number for work in together), default=0)
        copies = [each for work in together if isinstance(work, GpuWork) for each in work.copies]
        what = ("coalesced", operation, pending, self.timeout.total_seconds(), number)
        return GpuWork(copies, self, *what) if copies else Work(self, *what)

    # For code that is built on this class.

    def pending(self, request: Any, call: str, *memory: object) -> Pending:
        """Return what an operation yields for a request that `call` of MPI made; see `Pending`."""
        return Pending(self.requests, request, self._communicator, call, memory)

    def wait_for(self, request: MPI.Request, call: str, name: str, *memory: torch.Tensor) -> None:
        """Wait for what the MPI function `call` began, as a part of the operation `name`.

        Not collective.

        Raises:
            RuntimeError: other ranks did not come within the group's timeout.
        """
        # It keeps the memory if an exception ends the wait.
        pending = self.pending(request, call, *memory)
        seconds = self.timeout.total_seconds()
        if not pending.wait(seconds):
            raise self.timed_out(name, seconds)

    def abandon(self, *memory: object) -> None:
        """Keep memory that MPI may still use though nobody waits any more. Not collective."""
        self.under_way.abandon(*memory)

    def ends(self, pending: Pending, name: str, until: float, number: int = 0) -> bool:
        """Wait for a part of operation `name`; return whether it has ended by the running time.

        Not collective. `number`: which of this group's collectives; 0: a message.

        Raises:
            RuntimeError: another rank has said that the group is broken, or the part has failed.
        """
        while True:
            told = self.state.reason
            left = max(until - running_time.now(), 0.0)
            if pending.wait(min(left, under_way.LAST)):
                return True
            if told:
                raise self._broken_meanwhile(name, number)
            if left <= under_way.LAST:
                return False

    def leave(self, pending: Pending) -> None:
        """Let the engine move something along that nobody waits for. Not collective."""
        self.under_way.leave(pending)

    def wait_until(self, pending: Pending, name: str, limit: float, number: int) -> None:
        """Wait for the first part of a collective that is being started, at most `limit` seconds.

        Not collective. Meanwhile other threads may start operations.

        Raises:
            RuntimeError: other ranks did not come in time, or have broken the group.
        """
        until = 0.0
        self.starting.release()
        try:
            until = self._wait(pending, name, limit, number)
        finally:
            self.starting.acquire()
            self._until = until

    @property
    def has_blocks(self) -> bool:
        """Whether calls are compared in blocks, see Note [Calls in a block]."""
        return self.state.blocks is not None and not self._checked

    def send_block(self, block: Block) -> SentBlock:
        """Begin the all-reduce of a block, the operation's only call of MPI. Collective."""
        return cast(SentBlock, self._compare(block))

    def check_block(self, sent: SentBlock) -> None:
        """Raise RuntimeError if the ranks call what does not fit together. Not collective."""
        assert self.state.blocks is not None
        self.state.blocks.check(sent)

    def hurry(self) -> None:
        """Let what is under way end soon: the group is broken. In any thread."""
        self.under_way.hurry()

    def recorded(self, name: str) -> AbstractContextManager[None]:
        """Record what runs within as one collective. After the group's time limit the job ends.

        Collective. For calls of MPI that wait for other ranks and have no limit. `name`: in words.
        """
        with self.starting:
            return limited(self, self._enter(name))

    # Internal.

    def _enter(self, name: str, tensors: Sequence[torch.Tensor] = (), detail: object = None) -> int:
        """Count a collective, and return its record. Raises if the group is broken."""
        if self.state.reason:
            raise self.state.error(name)
        self.entered += 1
        self.last = call_of(name, detail, tensors)
        return ring.begin(self.source.number, self.entered, self.last, False, not self._checked)

    def _compare(self, block: Block | None = None) -> SentBlock | None:
        """Compare the collective that is being started with what other ranks have called.

        Collective. `block`: with the data; None: MPI gets that afterwards.

        Raises:
            RuntimeError: they do not fit together, or other ranks did not come in time.
        """
        call, self._uncompared = self._uncompared, None
        assert call is not None
        digest, blocks = self.state.enter(self.entered, call), self.state.blocks
        if blocks is None:
            return None
        sent = blocks.send(self.entered, call, digest, block)
        if block is not None:
            return sent
        if call.limit is None:
            self._ahead = sent
        else:
            blocks.wait(sent, call.limit)
        return None

    @noted
    def _start(
        self,
        name: str,
        function: Callable[..., Operation],
        arguments: tuple[Any, ...],
        opts: Any = None,
        tensors: Sequence[torch.Tensor] = (),
        detail: object = None,
        compared: Callable[[], Iterable[torch.Tensor]] | None = None,
        elements: Callable[[], tuple[Sequence[int], Sequence[int]]] | None = None,
        message: bool = False,
        agreed: Sequence[torch.Tensor] | None = None,
        event: Event | None = None,
    ) -> TorchWork:
        """Run an operation to its end, or if it is asynchronous, to its first yield.

        `function` makes it from the group and `arguments`. What follows `opts` must agree across
        ranks, see `call_check.check`; a message is neither compared nor counted. If the first of
        `tensors` is on a GPU, all must be, see Note [Operations on copies].
        """
        if event is None and dispatch_modes.is_seen(tensors, name, function):
            rest = (detail, compared, elements, message, agreed)
            # Not what hooks have put in its place: they have been called.
            start = OperationRunner._start
            return dispatch_modes.show(start, self, name, function, arguments, opts, tensors, rest)
        if torch.autograd.profiler._is_profiler_enabled and event is None:
            what = (function, arguments, opts, tensors, detail, compared, elements, message, agreed)
            event = Event(name)
            try:
                # Not what hooks have put in its place: they have been called.
                work = OperationRunner._start(self, name, *what, event=event)
            except BaseException:
                event.end()
                raise
            if work is COMPLETED:
                event.end()
            return work
        forks.check(name)
        if self.state.reason:
            raise self.state.error(name)
        uncaught.take_part()
        number = 0
        at_once = opts is not None and not opts.asyncOp and self._together is None
        copies = None
        if tensors and tensors[0].is_cpu is not gpu_tensors.CPU_IS_HOST:
            operation, copies = gpu_tensors.on_host(
                self, name, function, arguments, beside=not at_once
            )
        else:
            operation = ways.way_of(self, function)(self, *arguments)
        with self.starting:
            if message:
                # The second argument of both functions is the other rank.
                source, count = self._messages.next(name == "send", arguments[1])
                record = ring.begin(source, count, call_of(name, None, tensors), True, True)
            else:
                record = self._enter(name, tensors, detail)
                number = self.entered
            try:
                if message:
                    self.state.check(name)
                elif self._checked:
                    self.state.check(name)
                    call_check.check(self, name, detail, tensors, compared, elements)
                else:
                    if agreed is None:
                        agreed = () if elements is not None else tensors
                    same = compared() if compared is not None else agreed
                    limit = self._limit(opts) if at_once else None
                    self._uncompared = Call(name, detail, same, elements, tensors, limit)
                pending = next(operation)
                if self._uncompared is not None:  # others may have something to send
                    self._compare()
                if self._checked:
                    ring.started(record)
            except (TypeError, ValueError, RuntimeError) as error:
                ring.failed(record)
                misfit = self.misfit(error, number)
                if self._uncompared is not None:  # before MPI was called
                    self._uncompared = None
                    self.state.refused(number, name, detail, error)
                elif number and not self._checked:  # by it
                    self.state.failed(number, name, error)
                if misfit is not None:
                    raise misfit from error
                raise
            except BaseException as error:
                self._uncompared = None
                self.state.failed(number, name, error)
                ring.failed(record)
                # From a signal handler. MPI may have begun a call whose memory no Pending keeps
                # yet, but these frames do.
                self.abandon(error.__traceback__, arguments)
                raise
            finally:
                ahead, until = self._ahead, self._until
                self._ahead, self._until = None, 0.0
        # What comes from memory has all methods that are called here.
        waited = cast("list[Pending]", pending if isinstance(pending, list) else [pending])
        if ahead is not None:
            waited = [ahead.pending, *waited]
        if at_once:
            return self._finish(name, operation, waited, opts, number, record, until)
        if copies is None:
            work = Work(self, name, operation, waited, self._limit(opts), number)
        else:
            limit = self._limit(opts)
            work = GpuWork([copies], self, name, operation, waited, limit, number)
        work.record = record
        work.block = ahead
        if event is not None:
            work.event = event
        # A small message has gone at once, and the engine need not hear of it.
        if not work.is_completed():
            # Requests of one operation end at about the same time.
            if waited:
                ring.attach(record, waited[-1].job)
            for each in waited:
                if each.begun and not each.done:
                    each.submit()
            if ahead is not None and self.state.blocks is not None:
                self.state.blocks.starts.add(ahead, waited[1:])
            self.under_way.add(work)
        self.under_way.sweep_if_due()
        if self._together is not None:
            self._together.append(work)
        return work

    def _finish(
        self,
        name: str,
        operation: Iterator[object],
        waited: list[Pending],
        opts: Any,
        number: int,
        record: int,
        until: float,
    ) -> CompletedWork:
        try:
            for pending in waited:
                until = self._wait(pending, name, self._limit(opts), number, until)
        except BaseException as error:
            self.state.failed(number, name, error)
            ring.failed(record)
            self.abandon(operation, waited)
            misfit = self.misfit(error, number)
            if misfit is not None:
                raise misfit from error
            raise
        with ended_with_block(record):
            for _ in operation:
                raise AssertionError(f"{name} has a second step")
        return COMPLETED

    def wait_directly(
        self, name: str, pending: MemoryPending, opts: Any, number: int, record: int
    ) -> CompletedWork:
        """Wait for a collective that `DirectCalls` has begun. Collective."""
        waited = [cast(Pending, pending)]
        return self._finish(name, iter(()), waited, opts, number, record, 0.0)

    def _wait(
        self, pending: Pending, name: str, limit: float, number: int, until: float = 0.0
    ) -> float:
        """Wait for a part of an operation; return when its time is over, 0.0 if that is far."""
        if not pending.wait(_SHORT):
            until = until or running_time.now() + limit - _SHORT
            if not self.ends(pending, name, until, number):
                raise self.timed_out(name, limit, number)
        return until

    def _limit(self, opts: Any) -> float:
        """Return the time limit in seconds: the call's own, or the group's."""
        return limit_of(opts, self.timeout).total_seconds()

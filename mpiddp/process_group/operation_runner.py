"""Start a process group's operations, wait for them, and keep track of those under way.

It does not know the individual operations: `mpiddp.process_group.group` defines torch's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
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
from mpiddp.process_group.operation_call import OperationCall
from mpiddp.process_group.operation_waits import OperationWaits
from mpiddp.process_group.ordered_starts import kept
from mpiddp.process_group.under_way import UnderWay, noted
from mpiddp.process_group.work import COMPLETED, CompletedWork, Work, each_of
from mpiddp.torch_internals.compiler import skip_compilation
from mpiddp.torch_internals.profiling import Event
from mpiddp.watch.roll_call import RollCall
from mpiddp.watch.watchdog import ended_with_block, limited
from mpiddp.watch.wrapped_modules import WrappedModules


@skip_compilation
class OperationRunner(OperationWaits):
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
        *others: Any,
        **settings: Any,
    ) -> TorchWork:
        """Run an operation to its end, or if it is asynchronous, to its first yield.

        The arguments are those of `OperationCall`.
        """
        return self._run(OperationCall(name, function, arguments, opts, *others, **settings))

    def _run(self, call: OperationCall) -> TorchWork:
        """Carry out a call, and let who looks on see it."""
        if dispatch_modes.is_seen(call.tensors, call.name, call.function):
            return dispatch_modes.show(self._run, self, call)
        if not torch.autograd.profiler._is_profiler_enabled:
            return self._carry_out(call)
        event = Event(call.name)
        try:
            work = self._carry_out(call, event)
        except BaseException:
            event.end()
            raise
        if work is COMPLETED:
            event.end()
        return work

    def _carry_out(self, call: OperationCall, event: Event | None = None) -> TorchWork:
        """Go the way of every call; `DirectCalls` has it once more, without what is rare."""
        forks.check(call.name)
        if self.state.reason:
            raise self.state.error(call.name)
        uncaught.take_part()
        at_once = call.waits and self._together is None
        operation, copies = self._operation(call, beside=not at_once)
        with self.starting:
            number, record = self._count(call)
            try:
                waited = self._begin(call, operation, record, at_once)
            except BaseException as error:
                self._note_failure(call, number, record, error)
                raise
            finally:
                ahead, until = self._ahead, self._until
                self._ahead, self._until = None, 0.0
        if ahead is not None:
            waited = [ahead.pending, *waited]
        if at_once:
            return self._finish(call.name, operation, waited, call.opts, number, record, until)
        what = (call.name, operation, waited, self._limit(call.opts), number)
        work = Work(self, *what) if copies is None else GpuWork([copies], self, *what)
        work.record, work.block, work.event = record, ahead, event
        self._go_on_with(work)
        return work

    def _operation(self, call: OperationCall, beside: bool) -> tuple[Operation, Any]:
        """Return what is carried out, and the copies of what is on a GPU.

        `beside`: the copies are made while the caller goes on.
        """
        if call.tensors and call.tensors[0].is_cpu is not gpu_tensors.CPU_IS_HOST:
            return gpu_tensors.on_host(
                self, call.name, call.function, call.arguments, beside=beside
            )
        return ways.way_of(self, call.function)(self, *call.arguments), None

    def _count(self, call: OperationCall) -> tuple[int, int]:
        """Return which collective of this group a call is, 0 for a message, and its record."""
        if call.message:
            # The second argument of both functions is the other rank.
            source, count = self._messages.next(call.name == "send", call.arguments[1])
            recorded = call_of(call.name, None, call.tensors)
            return 0, ring.begin(source, count, recorded, True, True)
        record = self._enter(call.name, call.tensors, call.detail)
        return self.entered, record

    def _begin(
        self, call: OperationCall, operation: Operation, record: int, at_once: bool
    ) -> list[Pending]:
        """Compare a call, and take its operation to the first yield; return what it waits for."""
        if call.message:
            self.state.check(call.name)
        elif self._checked:
            self.state.check(call.name)
            rest = (call.detail, call.tensors, call.compared, call.elements)
            call_check.check(self, call.name, *rest)
        else:
            self._uncompared = call.to_compare(self._limit(call.opts) if at_once else None)
        pending = next(operation)
        if self._uncompared is not None:  # others may have something to send
            self._compare()
        if self._checked:
            ring.started(record)
        # What comes from memory has all methods that are called here.
        return cast("list[Pending]", pending if isinstance(pending, list) else [pending])

    def _note_failure(
        self, call: OperationCall, number: int, record: int, error: BaseException
    ) -> None:
        """Note what has kept a call from beginning, and tell other ranks.

        Raises:
            RuntimeError: what the ranks have called, if MPI says only that a message is cut.
        """
        ring.failed(record)
        begun, self._uncompared = self._uncompared is None, None
        if not isinstance(error, (TypeError, ValueError, RuntimeError)):
            self.state.failed(number, call.name, error)
            # From a signal handler. MPI may have begun a call whose memory no Pending keeps
            # yet, but these frames do.
            self.abandon(error.__traceback__, call.arguments)
            return
        misfit = self.misfit(error, number)
        if not begun:
            self.state.refused(number, call.name, call.detail, error)
        elif number and not self._checked:
            self.state.failed(number, call.name, error)
        if misfit is not None:
            raise misfit from error

    def _go_on_with(self, work: Work) -> None:
        """Let the engine move along what an asynchronous operation has begun, and keep that."""
        waited = work.pending
        # A small message has gone at once, and the engine need not hear of it.
        if not work.is_completed():
            # Requests of one operation end at about the same time.
            if waited:
                ring.attach(work.record, waited[-1].job)
            for each in waited:
                if each.begun and not each.done:
                    each.submit()
            if work.block is not None and self.state.blocks is not None:
                self.state.blocks.starts.add(work.block, waited[1:])
            self.under_way.add(work)
        self.under_way.sweep_if_due()
        if self._together is not None:
            self._together.append(work)

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

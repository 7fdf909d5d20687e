"""Start a process group's operations, wait for them, and keep track of those under way.

It does not know the individual operations: `mpiddp.process_group.group` defines torch's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch._C._distributed_c10d import Work as TorchWork

from mpiddp.collectives.operation import Operation
from mpiddp.engine import forks
from mpiddp.engine.engine import Engine
from mpiddp.engine.requests import Pending, Requests
from mpiddp.flight_recorder import files, ring, sources
from mpiddp.flight_recorder.call_text import Call, call_of, ranks_in_words
from mpiddp.mpi import communicators, uncaught
from mpiddp.mpi.errors import error_class
from mpiddp.process_group import call_check, gpu_tensors
from mpiddp.process_group.futures import FutureCompleter
from mpiddp.process_group.gpu_tensors import GpuWork
from mpiddp.process_group.group_state import GroupState
from mpiddp.process_group.roll_call import RollCall
from mpiddp.process_group.watchdog import ended_with_block, limited
from mpiddp.process_group.work import COMPLETED, CompletedWork, Work
from mpiddp.process_group.wrapped_modules import WrappedModules
from mpiddp.system import running_time
from mpiddp.torch_internals.compiler import skip_compilation
from mpiddp.torch_internals.profiling import Event

# Seconds within which most operations end: until then their time limit is not even looked at.
_SHORT = 5e-3

# Seconds that what is under way has to end, once another rank has said that the group is broken.
_LAST = 1.0

# Memory that MPI may still write to after a time limit was reached, or after Ctrl-C.
_abandoned: list[object] = []


@skip_compilation
class OperationRunner(dist.ProcessGroup):
    """The ranks of one communicator, and their operations.

    Collective over `communicator`.

    Args:
        communicator: an mpi4py intracommunicator that this group owns and frees.
        requests: those of the process.
        completion: completes the futures of the process.
        timeout: how long an operation may wait for other ranks.
    """

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
        self._uncompared: tuple[Any, ...] | None = None
        self.state = GroupState(self)
        self.engine: Engine = requests.engine
        self.completion = completion
        self.timeout: timedelta = timeout
        # How many collectives this rank has called, and the last: for the roll call.
        self.entered = 0
        self.last: Call | None = None
        self.roll_call: RollCall | None = None
        # What the flight recorder calls this group, its modules and its messages.
        self.source = sources.add(sources.Source("", range(self.size())))
        self._messages = sources.Messages(self.source, self._rank)
        self.modules = WrappedModules(self.source)
        self._requests = requests
        # MPI wants one thread at a time to start operations on a communicator.
        self._starting = threading.Lock()
        # Records whose calls of MPI wait without a limit: the watchdog ends the job instead.
        self.without_limit: set[int] = set()
        # Works that the caller may have forgotten while MPI uses their memory.
        self._under_way: list[Work] = []
        self._sweep_at = 16
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
            compared, self._uncompared = self._uncompared, None
            self.state.enter(self.entered, *compared)
        return self._communicator

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

    def describe_ranks(self, members: Iterable[int]) -> str:
        """Return words such as "ranks 0 to 3 and 7" for ranks in the group. Not collective."""
        return ranks_in_words(self.world_ranks, members)

    def _set_group_name(self, name: str) -> None:
        self._name = name
        sources.rename(self.source, name)

    def _set_group_desc(self, description: str) -> None:
        super()._set_group_desc(description)
        self.source.description = description

    def shutdown(self) -> None:
        """Free the group's communicator.

        Collective. Harmless when called twice, and in a forked child.
        """
        if forks.forked():
            return
        self._sweep()
        self.abandon(*self._under_way)
        self._under_way.clear()
        self.state.release()
        if self._communicator != MPI.COMM_NULL:
            self._communicator.Free()

    def forget_communicators(self) -> None:
        """Make shutdown free nothing, for an exit that is not collective. Not collective."""
        self._communicator = MPI.Intracomm()

    # Several operations as one.

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """Collect what is started from now on into one Work. Not collective."""
        self._together = []

    def _end_coalescing(self, device: torch.device | None = None) -> TorchWork:
        """Return a Work of all that was started since `_start_coalescing`. Not collective."""
        together, self._together = self._together or [], None
        operation = _each(together)
        pending = next(operation)
        assert isinstance(pending, list)
        seconds = self.timeout.total_seconds()
        number = max((work.number for work in together), default=0)
        copies = [each for work in together if isinstance(work, GpuWork) for each in work.copies]
        what = ("coalesced", operation, pending, seconds, number)
        return GpuWork(copies, self, *what) if copies else Work(self, *what)

    # For code that is built on this class.

    def pending(self, request: MPI.Request, call: str, *memory: object) -> Pending:
        """Return what an operation yields for a request that MPI function `call` has made.

        Not collective. `memory` is kept until the request has ended.
        """
        return Pending(self._requests, request, self.communicator, call, memory)

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
        _abandoned.append(memory)

    def ends(self, pending: Pending, name: str, until: float, number: int = 0) -> bool:
        """Wait for a part of operation `name`; return whether it has ended by the running time.

        Not collective. `number`: which of this group's collectives; 0: a message.

        Raises:
            RuntimeError: another rank has said that the group is broken, or the part has failed.
        """
        while True:
            told = self.state.reason
            left = max(until - running_time.now(), 0.0)
            if pending.wait(min(left, _LAST)):
                return True
            if told:
                raise self._broken_meanwhile(name, number)
            if left <= _LAST:
                return False

    def hear(self, reason: str) -> None:
        """Take from another rank that the group is broken. In any thread."""
        self.state.hear(reason)

    def hurry(self) -> None:
        """Let what is under way end soon: the group is broken. In any thread."""
        for work in list(self._under_way):
            work.deadline = min(work.deadline, running_time.now() + _LAST)

    def timed_out(
        self, name: str, seconds: float, number: int | None = None, gives_up: bool = True
    ) -> RuntimeError:
        """Return the error of an operation `name` that waited in vain; it may take seconds.

        Not collective. `number`: which of this group's collectives; None: the last, 0: a message.
        `gives_up`: nobody waits for it any more, and the group is broken.
        """
        if self.state.reason:
            return self._broken_meanwhile(name, number)
        if gives_up:
            own = self.describe_ranks([self._rank])
            reason = f"{name} on {own} has waited {seconds:g} s for other ranks"
            self.state.break_by(self.entered if number is None else number, reason)
        if number != 0:
            missing = self.explain_missing(number)
        else:
            missing = "Has the other rank called its part, and is it still alive?"
            if self.roll_call is not None:
                self.roll_call.alert(self)
        words = (
            f"rank {self.rank()} of {self.size()}: {name} on process group "
            f"{self.group_name or 'world'!r} has waited {seconds:g} s for other ranks, and its "
            f"timeout is over. "
            f"{missing}"
        )
        # The others have written theirs when they were asked what they do.
        return RuntimeError(f"{words} {files.dump_for(words)}".rstrip())

    def explain_missing(self, number: int | None = None) -> str:
        """Return which ranks keep a collective waiting; it may take seconds. Not collective."""
        if self.roll_call is None:
            return "Did all ranks call it, in the same order, and are they still alive?"
        return f"{self.roll_call.explain(self, number)}."

    def misfit(self, error: BaseException, number: int) -> RuntimeError | None:
        """Return an error that shows what the ranks have called, if a message was cut.

        Not collective; then it may take seconds. None if `error` is no such error. MPICH does not
        say which error it is: there calls that differ must be found.

        Args:
            error: of a collective.
            number: which of this group's; 0: a message, whose own error says it all.
        """
        kind = error_class(error) if number else MPI.SUCCESS
        if kind not in (MPI.ERR_TRUNCATE, MPI.ERR_OTHER):
            return None
        told, may_be_right = "", False
        if self.roll_call is not None:
            told, may_be_right = self.roll_call.explain_misfit(self, number)
        if kind == MPI.ERR_OTHER and not told:
            return None
        # Sizes of an all_gather that differ need not be what failed, where MPI does not say.
        fits = "may not" if kind == MPI.ERR_OTHER and may_be_right else "does not"
        words = (
            f"rank {self.rank()} of {self.size()}: what other ranks have sent for collective "
            f"{number} of process group {self.group_name or 'world'!r} {fits} fit here. "
            f"{told or 'The ranks have called different collectives, or with different tensors'}. "
        )
        if not self._checked:
            words += (
                "Some may have a wrong result already; with TORCH_DISTRIBUTED_DEBUG=DETAIL the "
                "ranks compare their calls before anything is sent. "
            )
        return RuntimeError(f"{words}{files.dump_for(words)} ({error})")

    def unlike(self, name: str, words: str) -> RuntimeError:
        """Return the error of a collective whose ranks disagree on sizes; it breaks the group.

        Not collective. `words`: what has come, and what was expected.
        """
        self.state.break_by(self.entered, f"in {name}, {words}")
        where = f"{name} on process group {self.group_name or 'world'!r}"
        return RuntimeError(f"rank {self._rank} of {self._size}: {where}: {words}")

    def recorded(self, name: str) -> AbstractContextManager[None]:
        """Record what runs within as one collective. After the group's time limit the job ends.

        Collective. For calls of MPI that wait for other ranks and have no limit of their own.

        Args:
            name: what it is, in words.
        """
        with self._starting:
            return limited(self, self._enter(name))

    # Internal.

    def _broken_meanwhile(self, name: str, number: int | None) -> RuntimeError:
        """Return the error of an operation that waits in a group that another rank has broken."""
        # That rank has found out who is missing, but its own words may come later, or never.
        missing = "" if number == 0 else self.explain_missing(number)
        return self.state.error(name, missing)

    def _enter(self, name: str, tensors: Sequence[torch.Tensor] = (), detail: object = None) -> int:
        """Count a collective, and return its record. Raises if the group is broken."""
        if self.state.reason:
            raise self.state.error(name)
        self.entered += 1
        self.last = call_of(name, detail, tensors)
        return ring.begin(self.source.number, self.entered, self.last, False, not self._checked)

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
            operation = function(self, *arguments)
        with self._starting:
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
                    self._uncompared = name, detail, same, elements, tensors
                pending = next(operation)
                self._uncompared = None
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
        waited = pending if isinstance(pending, list) else [pending]
        if at_once:
            return self._finish(name, operation, waited, opts, number, record)
        if copies is None:
            work = Work(self, name, operation, waited, self._limit(opts), number)
        else:
            limit = self._limit(opts)
            work = GpuWork([copies], self, name, operation, waited, limit, number)
        work.record = record
        if event is not None:
            work.event = event
        # A small message has gone at once, and the engine need not hear of it.
        if not work.is_completed():
            # Requests of one operation end at about the same time.
            if waited:
                ring.attach(record, waited[-1])
            for each in waited:
                if not each.done:
                    self._requests.submit(each)
            self._under_way.append(work)
        if len(self._under_way) > self._sweep_at:
            self._sweep()
        if self._together is not None:
            self._together.append(work)
        return work

    def _finish(
        self,
        name: str,
        operation: Operation,
        waited: list[Pending],
        opts: Any,
        number: int,
        record: int,
    ) -> CompletedWork:
        until = 0.0
        try:
            for pending in waited:
                if pending.wait(_SHORT):
                    continue
                until = until or running_time.now() + self._limit(opts) - _SHORT
                if not self.ends(pending, name, until, number):
                    raise self.timed_out(name, self._limit(opts), number)
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

    def _sweep(self) -> None:
        """Forget the works that are over."""
        self._under_way = [work for work in self._under_way if not work.end_if_due()]
        self._sweep_at = 16 + 2 * len(self._under_way)

    def _limit(self, opts: Any) -> float:
        """Return the time limit in seconds: the call's own, or the group's."""
        own = getattr(opts, "timeout", None)
        # torch marks "not given" by a negative time.
        limit = own if own is not None and own > timedelta(0) else self.timeout
        return float(limit.total_seconds())


def _each(works: list[Work]) -> Operation:
    """Wait for several works that were started already."""
    yield [pending for work in works for pending in work.pending]
    for work in works:
        Work.wait(work)  # in any thread: no stream must wait here
    return [tensor for work in works for tensor in work.result()]

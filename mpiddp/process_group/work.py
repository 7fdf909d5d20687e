"""Operations of a process group that are under way, as torch.distributed.Work.

Note [An operation is a generator]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each operation of the process group is a generator. Up to its first yield it checks its arguments
and calls MPI; it yields what it waits for, a `Pending` or a list of them; then it writes results
where torch expects them. It returns the value of the Work's future, or a function that makes this
value on demand. Whoever comes first runs that last part, under a lock: the caller in `Work.wait`, a
poll by `is_completed`, or the threads of mpiddp.process_group.futures.

Only one yield is allowed in an operation that may run while others start: a second MPI call on the
same communicator could come in a different order on each rank. Operations of several steps are
completed before the call returns. Between nodes the calls of MPI may be made later, see Note [Data
in the order of calls].

Note [Continuations run where they are added]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A continuation of a future may start collectives itself (torch's PowerSGD hook does). If it ran on
another thread as soon as messages have arrived, it would start them before those of the main thread
on one rank and after them on another. So a future's `then` waits for the operation, and runs the
continuation at once, in the thread that adds it: the same order on all ranks, as with NCCL. What
waits in C++, torch's own reducer, is served by the threads of mpiddp.process_group.futures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work as TorchWork

from mpiddp.engine import forks
from mpiddp.flight_recorder import ring
from mpiddp.system import running_time

if TYPE_CHECKING:
    from mpiddp.collectives.operation import Operation, SentBlock
    from mpiddp.collectives.patience import WaitHabit
    from mpiddp.engine.requests import Pending
    from mpiddp.process_group.interface import RunningGroup
    from mpiddp.torch_internals.profiling import Event

NOT_GIVEN = timedelta(0)  # torch's default in Work.wait

# Seconds between two looks at the clock, see Note [Running time].
LOOK = 0.5


class Work(TorchWork):
    """One operation under way. Made by `ProcessGroup`; torch defines what the methods mean.

    Not collective.

    Args:
        group: the process group that runs it.
        name: what torch calls it, such as "all_reduce".
        operation: its generator, after the first yield; see Note [An operation is a generator].
        pending: what it waits for.
        seconds: how long it may wait for other ranks.
        number: which of the group's collectives it is, from 1; 0: a message.

    Attributes:
        event: its event in the profiler, if that runs.
        record: its record in the flight recorder, -1 for none.
        peer: of a message, the other rank in the group; below 0: any.
        block: in which the ranks compare their calls before the data; None where there is none.
    """

    event: Event | None = None
    record = -1
    block: SentBlock | None = None
    peer: int | None = None

    def __init__(
        self,
        group: RunningGroup,
        name: str,
        operation: Operation,
        pending: list[Pending],
        seconds: float,
        number: int = 0,
    ) -> None:
        super().__init__()
        self.name = name
        self._group = group
        self._operation: Operation | None = operation
        self.pending = pending
        self.number = number
        self._seconds = seconds
        self.deadline = running_time.now() + seconds
        self._lock = threading.Lock()
        self._result: Any = None
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._untold: torch.futures.Future[Any] | None = None  # the future while not completed

    def wait(self, timeout: timedelta = NOT_GIVEN) -> bool:
        """Return True when the operation is complete.

        Args:
            timeout: the longest wait; zero: as long as the group, or the call, allows.

        Raises:
            RuntimeError: it failed, or other ranks did not come in time. When only `timeout` has
                passed, the operation goes on and may be waited for again.
        """
        seconds = timeout.total_seconds() if timeout > NOT_GIVEN else self._seconds
        if not self.wait_for_end(seconds):
            raise self._group.timed_out(self._told(), seconds, self.number, gives_up=False)
        if self._error is not None:
            raise self._error
        return True

    def wait_for_end(self, seconds: float | None = None) -> bool:
        """Wait until the operation has succeeded or failed; return whether it has, in time."""
        if self._operation is not None:
            if forks.forked():
                forks.check(f"the wait for {self.name}")
            seconds = self._seconds if seconds is None else seconds
            until = running_time.now() + seconds
            # Another thread may wait here already, and longer.
            if not self._lock.acquire(blocking=False) and not _acquired(self._lock, until):
                return False
            try:
                if self._operation is not None:
                    self._drive(until, gives_up=seconds >= self._seconds)
            finally:
                self._lock.release()
        if self._untold is not None and self._operation is None:
            self._tell()
        return self._operation is None

    @property
    def timeout(self) -> timedelta:
        """How long it may wait for other ranks."""
        return timedelta(seconds=self._seconds)

    def _get_sequence_number(self) -> int:
        """Return which of the group's collectives it is, from 1; 0: a message."""
        return self.number

    def is_completed(self) -> bool:
        """Return whether the operation has succeeded or failed."""
        if forks.forked():
            return self._operation is None
        if self._operation is not None and self._lock.acquire(blocking=False):
            try:
                if self._operation is not None:
                    self._poll()
            finally:
                self._lock.release()
            self._tell()
        return self._operation is None

    def is_success(self) -> bool:
        """Return whether the operation is complete and did not fail."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return what the operation failed with, None while it has not."""
        self.is_completed()
        return self._error

    def synchronize(self) -> None:
        """Do what `wait` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Do what `wait` does: the caller waits for MPI, not a stream."""
        self.wait()

    def result(self) -> Any:
        """Return what the future holds: a list of tensors. Waits for it."""
        self.wait()
        return self._value()

    def source_rank(self) -> int:
        """Return the rank in the group that a received tensor came from."""
        self.wait()
        return self.pending[0].source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result. It is completed whether anybody waits or not.

        See Note [Continuations run where they are added].
        """
        if self._future is None:
            with self._lock:
                if self._future is None:
                    self._future = self._untold = self._new_future()
            for pending in self.pending:
                pending.hand_over()  # which starts the engine's thread, if it is to have one
            if not self._group.engine.has_thread:
                # Nobody would make progress on it while its waiter sleeps in C++.
                self.wait_for_end()
            elif self._operation is not None:
                self._group.completion.add(self)
            self._tell()
        return self._future

    # torch's name for a future that only tells success; ours tells that as well.
    get_future_result = get_future

    def is_due(self) -> bool:
        """Return whether its requests are done, or its time is over. Tests none of them."""
        return (
            self._operation is None
            or all(pending.done for pending in self.pending)
            or (self.block is not None and self.block.differs)
            or running_time.now() > self.deadline
        )

    def end_if_due(self) -> bool:
        """End the operation if what it waits for is done, or its time is over.

        Makes no progress by itself. Returns whether it has ended.
        """
        if self._operation is not None and self._lock.acquire(blocking=False):
            try:
                if self._operation is not None:
                    if self.block is not None and self.block.differs:
                        self._fail(self._group.misfit_in(self.block))
                    elif all(pending.done for pending in self.pending):
                        self._drive(0.0, gives_up=False)
                    elif running_time.now() > self.deadline:
                        self._give_up()
            finally:
                self._lock.release()
            self._tell()
        return self._operation is None

    def _poll(self) -> None:
        try:
            ended = [pending.test() for pending in self.pending]  # every one makes progress
            if self.block is not None and self.block.differs:
                raise self._group.misfit_in(self.block)
            if all(ended):
                self._end()
            elif not self.pending[-1].begun and self._group.state.blocks is not None:
                self._group.state.blocks.starts.begin_due()
        except RuntimeError as error:
            if self.number:
                self._group.state.failed(self.number, self.name, error)
            self._fail(self._group.misfit(error, self.number) or error)

    def _drive(self, until: float, gives_up: bool) -> None:
        """Wait for what is pending, then end; if the time is over before, perhaps give up."""
        try:
            for pending in self.pending:
                begun = pending.begun or self._begins(pending, until)
                if not (begun and self._group.ends(pending, self.name, until, self.number)):
                    if gives_up:
                        self._give_up()
                    return
                if self.block is not None and self.block.differs:
                    raise self._group.misfit_in(self.block)
            self._end()
        except RuntimeError as error:
            if self.number:
                self._group.state.failed(self.number, self.name, error)
            self._fail(self._group.misfit(error, self.number) or error)

    def _begins(self, pending: Pending, until: float) -> bool:
        blocks = self._group.state.blocks
        assert blocks is not None
        ends = partial(self._group.ends, name=self.name, until=until, number=self.number)
        return blocks.starts.wait(self.name, lambda: pending.begun, ends)

    def _end(self) -> None:
        assert self._operation is not None
        try:
            next(self._operation)
            raise AssertionError(f"{self.name} has a second step")
        except StopIteration as stop:
            if self.event is not None:
                self.event.end()
            self._result = stop.value
            self._operation = None
            ring.ended(self.record)
        except Exception as error:
            self._fail(error)
        except BaseException:
            # The generator is over: a later wait would take half a result for the whole.
            self._fail(RuntimeError(f"{self.name} was interrupted while its results were written"))
            raise

    def _told(self) -> str:
        """Return what errors call it: of a message also the other rank."""
        if self.peer is None:
            return self.name
        other = "any rank" if self.peer < 0 else self._group.describe_ranks([self.peer])
        return f"{self.name} {'to' if self.name == 'send' else 'from'} {other}"

    def _give_up(self) -> None:
        self._fail(self._group.timed_out(self._told(), self._seconds, self.number))

    def _fail(self, error: Exception) -> None:
        for pending in self.pending:
            pending.take_back()
        if not all(pending.done for pending in self.pending):
            # One message failed, but the engine still moves the others.
            self._group.abandon(self._operation, self.pending)
        if self.event is not None:
            self.event.end()
        ring.failed(self.record)
        self._error = error
        self._operation = None

    def _tell(self) -> None:
        """Complete the future, once, if there is one and the operation has ended."""
        with self._lock:
            future, self._untold = self._untold, None
            if future is not None and self._operation is not None:
                future, self._untold = None, future
        if future is None:
            return
        # Runs continuations, which may wait for anything: no lock is held.
        if self._error is not None:
            future.set_exception(self._error)
        else:
            self._complete(future)

    def _new_future(self) -> OperationFuture:
        return OperationFuture(self)

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        future.set_result(self._value())

    def _value(self) -> Any:
        return self._result() if callable(self._result) else self._result


class DirectWork(Work):
    """One operation under way that `DirectCalls` has begun.

    Args:
        habit: is told of the wait.
        arguments: of `Work`.
    """

    def __init__(self, habit: WaitHabit, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._habit = habit

    def wait(self, timeout: timedelta = NOT_GIVEN) -> bool:
        """Return True when the operation is complete. Raises what `Work.wait` does."""
        self._habit.waited(self.number)
        return super().wait(timeout)


def _acquired(lock: threading.Lock, until: float) -> bool:
    """Acquire a lock before the running time is `until`; return whether that was possible."""
    clock = running_time.Clock()
    while not lock.acquire(timeout=min(max(until - clock.now(), 0.0), LOOK)):
        if clock.now() > until:
            return False
    return True


class OperationFuture(torch.futures.Future[Any]):
    """The future of a `Work`: whoever asks it in Python drives the operation to its end.

    Not collective.

    Args:
        work: the operation.
        devices: the GPUs that its result may be on.
    """

    def __init__(self, work: Work, devices: Sequence[torch.device] = ()) -> None:
        super().__init__(devices=list(devices))
        self._work = work

    def done(self) -> bool:
        """Return whether the operation has succeeded or failed."""
        self._work.is_completed()
        return super().done()

    def wait(self) -> Any:
        """Return the result, or raise what the operation failed with."""
        self._work.wait_for_end()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """Wait, run `callback` with this future, and return a future of what it returns."""
        self._work.wait_for_end()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Wait, and run `callback` with this future."""
        self._work.wait_for_end()
        super().add_done_callback(callback)


class CompletedWork(TorchWork):
    """The Work of a call that has waited already."""

    def wait(self, timeout: timedelta = NOT_GIVEN) -> bool:
        """Return True. Not collective."""
        return True

    def is_completed(self) -> bool:
        """Return True. Not collective."""
        return True

    is_success = is_completed

    def exception(self) -> None:
        """Return None. Not collective."""


COMPLETED = CompletedWork()


def limit_of(opts: Any, limit: timedelta) -> timedelta:
    """Return the time limit of a call: its own, or the group's. Not collective."""
    own = getattr(opts, "timeout", None)
    # torch marks "not given" by a negative time.
    return own if own is not None and own > timedelta(0) else limit


class EndedWork(CompletedWork):
    """The Work of an asynchronous call that has ended before it returned.

    Args:
        result: what the future holds, or a function that makes it.
        number: which of the group's collectives it is.
        opts: of the call.
        limit: of the group.
        habit: is told of the wait.
    """

    def __init__(
        self, result: Any, number: int, opts: Any, limit: timedelta, habit: WaitHabit
    ) -> None:
        super().__init__()
        self._result, self.number, self._opts, self._limit = result, number, opts, limit
        self._habit = habit

    def wait(self, timeout: timedelta = NOT_GIVEN) -> bool:
        """Return True. Not collective."""
        self._habit.waited(self.number)
        return True

    @property
    def timeout(self) -> timedelta:
        """How long it might have waited for other ranks."""
        return limit_of(self._opts, self._limit)

    def _get_sequence_number(self) -> int:
        """Return which of the group's collectives it is."""
        return self.number

    def synchronize(self) -> None:
        """Do nothing. Not collective."""

    block_current_stream = synchronize

    def result(self) -> Any:
        """Return what the future holds: a list of tensors. Not collective."""
        return self._result() if callable(self._result) else self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that holds the result. Not collective."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future

    get_future_result = get_future


def each_of(works: list[Work]) -> Operation:
    """Wait for several works that were started already. Collective with them."""
    yield [pending for work in works for pending in work.pending]
    for work in works:
        Work.wait(work)  # in any thread: no stream must wait here
    return [tensor for work in works for tensor in work.result()]


def with_peer(work: TorchWork, peer: int) -> TorchWork:
    """Return the Work of a message, which knows the other rank. Not collective."""
    if isinstance(work, Work):
        work.peer = peer
    return work

"""A process group's operations on GPU tensors: run on copies of them in pinned host memory.

The operations themselves, and MPI, see tensors on the CPU only.

Note [Operations on copies]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
What a call reads is copied to the host on the caller's current stream, behind the kernels that
produce it, and the calling thread waits for that copy's event, and for nothing else on the GPU.
That holds for asynchronous calls as well: MPI wants the operations of a communicator started in
one order on all ranks, and only the calling threads have such an order. An asynchronous call leaves
only the transfer over the network and the copies back to other threads.

When MPI is done, whoever ends the operation (see Note [An operation is a generator]) starts the
copies back and does not wait for them. After a synchronous call they are on the caller's current
stream. After an asynchronous one they are on a stream of ours, behind what was on the current
stream at the time of the call; `Work.wait` lets the current stream of its caller wait for them,
and futures record them as torch's futures of GPU tensors do.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.collectives import movement, point_to_point, reductions, ways
from mpiddp.engine.engine import look_at_others
from mpiddp.gpu.runtime import Event
from mpiddp.process_group.gpu_copies import copier_of
from mpiddp.process_group.work import NOT_GIVEN, OperationFuture, Work
from mpiddp.system import running_time

if TYPE_CHECKING:
    from mpiddp.collectives.operation import Operation
    from mpiddp.process_group.interface import RunningGroup

__all__ = [
    "CPU_IS_HOST",
    "GpuWork",
    "HostCopies",
    "any_on_gpu",
    "on_host",
    "through_host",
    "wait_for_stream",
]

# Whether CPU tensors are on the host. Tests let them stand for tensors on a simulated GPU.
CPU_IS_HOST = True

# What an operation does with the tensors of an argument.
_NOTHING, _READS, _WRITES, _BOTH = 0, 1, 2, 3

# By argument, without the group. Operations with a root are in `_uses`; of all others, every
# argument is copied both ways.
_USES: dict[Callable[..., Any], tuple[int, ...]] = {
    reductions.all_reduce: (_BOTH,),
    reductions.all_reduce_together: (_BOTH,),
    reductions.reduce_scatter: (_WRITES, _READS),
    reductions.reduce_scatter_single: (_WRITES, _READS),
    movement.all_gather: (_WRITES, _READS),
    movement.all_gather_single: (_WRITES, _READS),
    movement.all_to_all: (_WRITES, _READS),
    movement.all_to_all_single: (_WRITES, _READS),
    point_to_point.send: (_READS,),
    point_to_point.receive: (_WRITES,),
}

# Seconds. Small copies end sooner than a sleep would; after that, the waiting thread sleeps.
_SPIN = 50e-6
_SHORTEST_NAP = 50e-6
_LONGEST_NAP = 1e-3


def on_host(
    group: RunningGroup,
    name: str,
    function: Callable[..., Operation],
    arguments: Sequence[Any],
    beside: bool,
) -> tuple[Operation, HostCopies]:
    """Return an operation that runs another one on host copies of device tensors, and the copies.

    Not collective. It first waits for the current stream, then does what the other one does.

    Args:
        group: the process group.
        name: what torch calls the operation, for errors.
        function: makes the other operation from the group and the arguments.
        arguments: tensors, lists of them, and anything else.
        beside: whether results are copied back beside the current stream, or on it.

    Raises:
        ValueError: the tensors are on several devices, or on one that is no GPU of CUDA or ROCm.
    """
    tensors: dict[int, torch.Tensor] = {}
    uses: dict[int, int] = {}
    for argument, use in zip(arguments, _uses(group, function, arguments), strict=False):
        for tensor in _tensors_in(argument) if use else ():
            tensors[id(tensor)] = tensor
            uses[id(tensor)] = uses.get(id(tensor), _NOTHING) | use
    copies = HostCopies(group, name, _one_device(name, tensors.values()), beside)
    read = [tensor for key, tensor in tensors.items() if uses[key] & _READS]
    written = [tensor for key, tensor in tensors.items() if uses[key] & _WRITES]

    def operate() -> Operation:
        copies.bring(read, written)
        operation = ways.way_of(group, function)
        result = yield from operation(group, *(copies.of(argument) for argument in arguments))
        if written:
            copies.give_back(written)
        return copies.behind(result)

    return operate(), copies


def any_on_gpu(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether some of the tensors are not on the host."""
    return any(tensor.is_cpu is not CPU_IS_HOST for tensor in tensors)


def through_host(
    group: RunningGroup,
    name: str,
    tensors: Sequence[torch.Tensor],
    change: Callable[[Sequence[torch.Tensor]], bool],
) -> bool:
    """Let `change` change tensors in host memory; write back those that it has changed.

    Collective if `change` is. The tensors may be on several GPUs; those on the CPU are changed
    in place.

    Returns:
        What `change` returns.
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_cpu is not CPU_IS_HOST:
            by_device.setdefault(tensor.device, []).append(tensor)
    host = list(tensors)
    several = []
    for device, own in by_device.items():
        copies = HostCopies(group, name, device, beside=False)
        copies.bring(own, own)
        host = copies.of(host)
        several.append((copies, own, [copy._version for copy in copies.of(own)]))
    result = change(host)
    for copies, own, versions in several:
        now = [copy._version for copy in copies.of(own)]
        changed = [own[i] for i, version in enumerate(versions) if now[i] != version]
        if changed:
            copies.give_back(changed)
            torch.autograd.graph.increment_version(changed)
    return result


def wait_for_stream(group: RunningGroup, name: str, device: torch.device) -> None:
    """Wait until this thread's current stream of a GPU has done its work. Not collective.

    Raises:
        RuntimeError: it has not within the group's timeout.
    """
    copier = copier_of(device)
    with copier.using():
        _wait(group, name, device, copier.mark(copier.current_stream()))


class HostCopies:
    """The copies on the host of the tensors of one call. Not collective.

    Args:
        group: the process group.
        name: what torch calls the operation, for errors.
        device: where all the tensors are.
        beside: whether `give_back` copies beside the current stream, or on it.
    """

    def __init__(self, group: RunningGroup, name: str, device: torch.device, beside: bool) -> None:
        self.device = device
        self._copier = copier_of(device)
        self._group, self._name = group, name
        self._beside = beside
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the tensor's id
        self._called: Event | None = None
        self._returned: Event | None = None

    def bring(self, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """Make the copies, and wait until the current stream has written them.

        Args:
            read: tensors to copy.
            written: tensors that need room on the host; they may be among those to copy.

        Raises:
            RuntimeError: the stream did not get to the copies within the group's timeout.
        """
        copier = self._copier
        with copier.using():
            # Apart, so that code that compares storages sees that inputs are not outputs.
            keys = {id(tensor) for tensor in written}
            only_read = [tensor for tensor in read if id(tensor) not in keys]
            for tensors in (only_read, written):
                for tensor, copy in zip(tensors, copier.host_memory_like(tensors), strict=True):
                    self._copies[id(tensor)] = tensor, copy
            stream = copier.current_stream()
            if not read:
                self._called = copier.mark(stream)
                return
            try:
                self._called = copier.to_host((self._copies[id(tensor)] for tensor in read), stream)
                _wait(self._group, self._name, self.device, self._called)
            except BaseException:
                self._group.abandon(self._copies)  # copies may be under way
                raise
            copier.let_go()

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start copying the host copies back to the tensors."""
        copier = self._copier
        pairs = [self._copies[id(tensor)] for tensor in tensors]
        with copier.using():
            stream = copier.back if self._beside else copier.current_stream()
            if self._beside:
                assert self._called is not None
                copier.runtime.stream_wait_event(stream, self._called)
            try:
                self._returned = copier.to_device(pairs, stream, self if self._beside else None)
            except BaseException:
                self._group.abandon(pairs)  # copies may be under way
                raise

    def order(self) -> None:
        """Let this thread's current stream wait for what was given back.

        From then on, as after any Work of torch, the caller must keep the tensors.
        """
        if self._returned is not None:
            self._copies.clear()
            with self._copier.using():
                stream = self._copier.current_stream()
                self._copier.runtime.stream_wait_event(stream, self._returned)

    def behind_order(self) -> contextlib.AbstractContextManager[object]:
        """Within, order torch's work in this thread after what was given back."""
        return self._copier.on_back()

    @property
    def over(self) -> bool:
        """Whether the copies back have ended."""
        return self._returned is None or self._returned.query()

    def of(self, value: Any) -> Any:
        """Return a value with its tensors replaced by their host copies."""
        return _replaced(value, {key: copy for key, (_, copy) in self._copies.items()})

    def behind(self, value: Any) -> Any:
        """Return a value with its host copies replaced by their tensors."""
        return _replaced(value, {id(copy): tensor for tensor, copy in self._copies.values()})


class GpuWork(Work):
    """A `Work` whose results come back to a GPU. Not collective.

    Args:
        copies: those of its operation or operations.
        arguments: those of `Work`.
    """

    def __init__(self, copies: Sequence[HostCopies], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.copies = copies

    def wait(self, timeout: timedelta = NOT_GIVEN) -> bool:
        """Wait until MPI is done, and let the current stream wait for the results.

        Raises what `Work.wait` does.
        """
        super().wait(timeout)
        for copies in self.copies:
            copies.order()
        return True

    def is_completed(self) -> bool:
        """Return whether the operation has succeeded or failed, and the copies back have ended."""
        return super().is_completed() and all(copies.over for copies in self.copies)

    def _new_future(self) -> OperationFuture:
        devices = {copies.device for copies in self.copies if copies.device.type == "cuda"}
        return OperationFuture(self, sorted(devices, key=str))

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        with contextlib.ExitStack() as stack:
            for copies in self.copies:
                stack.enter_context(copies.behind_order())
            future.set_result(self._value())


def _uses(
    group: RunningGroup, function: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[int, ...]:
    """Return what an operation does with each of the arguments on this rank."""
    if function is reductions.reduce:
        return (_BOTH if group.rank() == arguments[2] else _READS,)
    if function is movement.broadcast:
        return (_READS if group.rank() == arguments[1] else _WRITES,)
    if function in (movement.gather, movement.gather_single):
        return (_WRITES if group.rank() == arguments[2] else _NOTHING, _READS)
    if function is movement.scatter:
        return (_WRITES, _READS if group.rank() == arguments[2] else _NOTHING)
    return _USES.get(function) or (_BOTH,) * len(arguments)


def _one_device(name: str, tensors: Iterable[torch.Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(
            f"{name} takes tensors that are all on one device, not on "
            f"{' and '.join(sorted(map(str, devices)))}"
        )
    return devices.pop()


def _wait(group: RunningGroup, name: str, device: torch.device, event: Event) -> None:
    """Wait for an event, but no longer than the group waits for other ranks.

    What the stream itself waits for may come from them.
    """
    clock = running_time.Clock()
    began = clock.now()
    limit = group.timeout.total_seconds()
    while not event.query():
        waited = clock.now() - began
        if waited > limit:
            raise RuntimeError(
                f"rank {group.rank()} of {group.own_size}: {name} on process group "
                f"{group.group_name or 'world'!r} has waited {limit:g} s for what the current "
                f"stream of {device} has to do before it"
            )
        # Other ranks may wait for a bucket of this one meanwhile.
        group.engine.progress()
        look_at_others(clock)
        if waited > _SPIN:
            time.sleep(min(max(waited / 16, _SHORTEST_NAP), _LONGEST_NAP))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors_in(part)


def _replaced(value: Any, by_id: dict[int, torch.Tensor]) -> Any:
    """Return a tensor, a list or a partial call with its tensors replaced."""
    if isinstance(value, torch.Tensor):
        return by_id.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return [_replaced(part, by_id) for part in value]
    if isinstance(value, functools.partial):
        return functools.partial(value.func, *_replaced(value.args, by_id))
    return value

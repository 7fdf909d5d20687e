"""The short way of a collective: contiguous tensors on the CPU, ranks on one node.

It is the way of `OperationRunner` without what is rare. Whatever is not as usual (a hook, a
profiler, a mode, another dtype, an earlier call that has not ended) is handed to the group's own
method before anything is counted, compared or shown to other ranks, so that a call is the same for
them whichever way it takes.
"""

import torch
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack
from torch._C._distributed_c10d import (
    AllgatherOptions, AllreduceOptions, BarrierOptions, BroadcastOptions, DebugLevel,
    ReduceScatterOptions, get_debug_level,
)

from mpiddp.collectives.group_memory cimport MemoryPending
from mpiddp.collectives.memory_jobs cimport GATHER_ALL, MEET, REDUCE_ALL, REDUCE_PARTS, SPREAD
from mpiddp.collectives.patience cimport WaitHabit
from mpiddp.engine.forks cimport is_child
from mpiddp.process_group.call_table cimport digest_of
from mpiddp.torch_internals.tensors cimport dense_memory
from mpiddp.flight_recorder import ring
from mpiddp.flight_recorder.call_text import call_of
from mpiddp.collectives import movement
from mpiddp.mpi import uncaught
from mpiddp.process_group import gpu_tensors
from mpiddp.process_group.call_table import FITS, code_of_dtype, code_of_name
from mpiddp.process_group.work import COMPLETED, DirectWork, EndedWork
from mpiddp.system.kernels import ELEMENTS
from mpiddp.torch_internals.tensors import code_of

_ALL_REDUCE = code_of_name("all_reduce")
_REDUCE_SCATTER = code_of_name("reduce_scatter")
_BROADCAST = code_of_name("broadcast")
_ALL_GATHER = code_of_name("all_gather")
_BARRIER = code_of_name("barrier")
# What hash() returns for a ReduceOp of them.
_SUM, _AVG = hash(dist.ReduceOp(dist.ReduceOp.SUM)), hash(dist.ReduceOp(dist.ReduceOp.AVG))

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_profiler = torch.autograd.profiler


def install(group):
    """Let a group whose ranks share memory take the short way, unless its calls are checked.

    Not collective.
    """
    if get_debug_level() == DebugLevel.DETAIL:
        return
    calls = DirectCalls(group)
    for name in (
        "allreduce", "broadcast", "allgather", "all_gather_single", "_allgather_base",
        "reduce_scatter_single", "_reduce_scatter_base", "barrier",
    ):
        setattr(group, name, getattr(calls, name))


cdef inline bint overlap(const char *first, size_t size, const char *second, size_t other) noexcept:
    return first < second + other and second < first + size


cdef class DirectCalls:
    """The short ways of one group's operations; those of `ProcessGroup` say what they do.

    Not collective, but its methods are.

    Args:
        group: a ProcessGroup whose `state` has a page and memory.
    """

    def __init__(self, group):
        self.group = group
        self.attributes = group.__dict__
        self.members = vars(type(group))
        self.state = group.state
        self.lock = group.starting
        self.habit = WaitHabit()
        self.memory = group.state.memory
        self.page = group.state.page
        self.source = group.source.number
        self.elements = {code_of(dtype): element for dtype, element in ELEMENTS.items()}
        self.codes = {code_of(dtype): code_of_dtype(dtype) for dtype in ELEMENTS}
        self.asks_device = bool(torch.version.cuda or torch.version.hip)

    def allreduce(self, *arguments, **named):
        cdef Told told
        cdef int dtype = -1
        cdef char *address
        if len(arguments) == 2 and not named:
            tensors, opts = arguments
            if self.may_go(opts, AllreduceOptions) and type(tensors) is list and len(tensors) == 1:
                address = self.plain(tensors[0], &dtype, &told.size)
                op = opts.reduceOp
                if address != NULL and self.reduces(dtype, op, &told):
                    told.name, told.times = _ALL_REDUCE, 1
                    done = self.go(
                        REDUCE_ALL, "all_reduce", op, tensors, opts, &told, address, address, None,
                        dtype, tensors, tensors,
                    )
                    if done is not None:
                        return done
        return self.long_way("allreduce", arguments, named)

    def broadcast(self, *arguments, **named):
        cdef Told told
        cdef int dtype = -1
        cdef char *address
        if len(arguments) == 2 and not named:
            tensors, opts = arguments
            if self.may_go(opts, BroadcastOptions) and type(tensors) is list and len(tensors) == 1:
                address = self.plain(tensors[0], &dtype, &told.size)
                root = opts.rootRank
                if address != NULL and 0 <= root < self.memory.state.ranks:
                    told.name, told.times, told.detail, told.dtype = _BROADCAST, 1, root, 0
                    done = self.go(
                        SPREAD, "broadcast", root, tensors, opts, &told, address, address, None,
                        dtype, tensors, tensors,
                    )
                    if done is not None:
                        return done
        return self.long_way("broadcast", arguments, named)

    def allgather(self, *arguments, **named):
        cdef Told told
        cdef int dtype = -1, other = -1
        cdef size_t size = 0
        cdef char *source
        cdef char *target
        cdef unsigned int rank
        if len(arguments) == 3 and not named:
            lists, inputs, opts = arguments
            if (
                self.may_go(opts, AllgatherOptions) and type(lists) is list and len(lists) == 1
                and type(inputs) is list and len(inputs) == 1
                and type(lists[0]) is list and len(lists[0]) == self.memory.state.ranks
            ):
                source = self.plain(inputs[0], &dtype, &told.size)
                targets = []
                for rank in range(self.memory.state.ranks if source != NULL else 0):
                    target = self.plain(lists[0][rank], &other, &size)
                    if target == NULL or other != dtype or size != told.size or (
                        overlap(source, size, target, size)
                        and not (rank == self.memory.state.rank and source == target)
                    ):
                        break
                    targets.append(<size_t>target)
                if len(targets) == self.memory.state.ranks:
                    told.name, told.times, told.detail = _ALL_GATHER, len(targets), -1
                    told.dtype = 0
                    done = self.go(
                        GATHER_ALL, "all_gather", None, inputs, opts, &told, source, NULL, targets,
                        dtype, arguments, movement.stacked(lists),
                    )
                    if done is not None:
                        return done
        return self.long_way("allgather", arguments, named)

    def all_gather_single(self, *arguments, **named):
        cdef Told told
        cdef int dtype = -1, other = -1
        cdef size_t whole = 0
        cdef char *source
        cdef char *target
        cdef unsigned int rank, ranks = self.memory.state.ranks
        if len(arguments) == 3 and not named:
            output, input_, opts = arguments
            if self.may_go(opts, AllgatherOptions):
                source = self.plain(input_, &dtype, &told.size)
                target = self.plain(output, &other, &whole)
                if (
                    source != NULL and target != NULL and dtype == other
                    and whole == told.size * ranks
                    and (
                        not overlap(source, told.size, target, whole)
                        or source == target + told.size * self.memory.state.rank
                    )
                ):
                    told.name, told.times, told.detail, told.dtype = _ALL_GATHER, 1, -1, 0
                    done = self.go(
                        GATHER_ALL, "all_gather", None, [input_], opts, &told, source, NULL,
                        [<size_t>target + rank * told.size for rank in range(ranks)],
                        dtype, arguments, [output],
                    )
                    if done is not None:
                        return done
        return self.long_way("all_gather_single", arguments, named)

    def reduce_scatter_single(self, *arguments, **named):
        cdef Told told
        cdef int dtype = -1, other = -1
        cdef size_t whole = 0
        cdef char *source
        cdef char *target
        cdef unsigned int rank, ranks = self.memory.state.ranks
        if len(arguments) == 3 and not named:
            output, input_, opts = arguments
            if self.may_go(opts, ReduceScatterOptions):
                target = self.plain(output, &dtype, &told.size)
                source = self.plain(input_, &other, &whole)
                op = opts.reduceOp
                if (
                    source != NULL and target != NULL and dtype == other
                    and whole == told.size * ranks and self.reduces(dtype, op, &told)
                    and not overlap(source, whole, target, told.size)
                ):
                    told.name, told.times = _REDUCE_SCATTER, 1
                    done = self.go(
                        REDUCE_PARTS, "reduce_scatter", op, [output], opts, &told, NULL, target,
                        [<size_t>source + rank * told.size for rank in range(ranks)],
                        dtype, arguments, [output],
                    )
                    if done is not None:
                        return done
        return self.long_way("reduce_scatter_single", arguments, named)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, *arguments, **named):
        cdef Told told
        opts = arguments[0] if len(arguments) == 1 else named.get("opts")
        if len(arguments) + len(named) == 1 and self.may_go(opts, BarrierOptions):
            device = opts.device if self.asks_device else None
            if device is None or device.type == "cpu":
                told.name, told.times, told.detail, told.size, told.dtype = _BARRIER, 0, -1, 0, 0
                done = self.go(
                    MEET, "barrier", None, (), opts, &told, NULL, NULL, None, -1, None, [])
                if done is not None:
                    return done
        return self.long_way("barrier", arguments, named)

    def long_way(self, name, arguments, named):
        """Call the group's own method. Collective."""
        return getattr(type(self.group), name)(self.group, *arguments, **named)

    cdef bint may_go(self, object opts, object kind) except -1:
        """Whether nothing is unusual about the call or the group."""
        return (
            type(opts) is kind
            and self.has_room()
            and self.state.memory is self.memory
            and "_start" not in self.attributes     # else hooks look on, ...
            and "_enter" not in self.members        # ... or who counts what is reduced
            and self.attributes["_together"] is None
            and gpu_tensors.CPU_IS_HOST             # not so in tests without a GPU
            and not _profiler._is_profiler_enabled
            and not _len_torch_dispatch_stack()
            and not is_child()
        )

    cdef bint has_room(self) except -1:
        """Whether nothing else is under way."""
        if self.memory.awaited is not None:
            with self.lock:
                self.memory.settle()
        return self.memory.is_free()

    cdef char *plain(self, object tensor, int *dtype, size_t *size) except? NULL:
        kind = type(tensor)
        if kind is not _Tensor and kind is not _Parameter:
            return NULL
        return dense_memory(tensor, dtype, size)

    cdef bint reduces(self, int dtype, object op, Told *told) except -1:
        """Whether the kernels reduce so; then note what is compared of it."""
        told.detail = hash(op)
        if dtype not in self.elements or not (told.detail == _SUM or told.detail == _AVG):
            return False
        told.dtype = self.codes[dtype]
        return True

    cdef bint fits(self, Told *told) except -1:
        """Compare the call; count it if it fits, else the long way finds the same and says it."""
        cdef long long number = self.state.compared + 1
        cdef unsigned long long digest = digest_of(
            told.name, told.detail, told.size, told.times, told.dtype, number)
        if self.page.enter(number, digest) != FITS:
            return False
        self.state.compared = number
        return True

    cdef object go(
        self, int kind, str name, object detail, object tensors, object opts, Told *told,
        char *source, char *target, list addresses, int dtype, object kept, object result,
    ):
        """Carry out a call; return its Work, None where it does not fit."""
        cdef MemoryPending pending
        cdef long long record
        cdef double divisor = self.memory.state.ranks if told.detail == _AVG else 1.0
        uncaught.take_part()
        with self.lock:
            if self.state.reason or not self.fits(told):
                return None
            number = self.attributes["entered"] + 1
            self.attributes["entered"] = number
            last = self.attributes["last"] = call_of(name, detail, tensors)
            record = ring.begin(self.source, number, last, False, True)
            self.memory.at_once = not opts.asyncOp or self.habit.expects_wait()
            try:
                if kind == MEET:
                    pending = self.memory.meet()
                elif kind == REDUCE_ALL:
                    pending = self.memory.reduce(
                        <size_t>source, <size_t>target, told.size, self.elements[dtype], 0,
                        divisor, -1, kept)
                elif kind == SPREAD:
                    pending = self.memory.spread(<size_t>source, told.size, detail, kept)
                elif kind == GATHER_ALL:
                    pending = self.memory.gather(<size_t>source, addresses, told.size, kept)
                else:
                    pending = self.memory.reduce_parts(
                        addresses, <size_t>target, told.size, self.elements[dtype], 0, divisor,
                        kept)
            except BaseException as error:
                self.state.failed(number, name, error)
                ring.failed(record)
                raise
        if opts.asyncOp:
            return self.work_of(pending, name, result, opts, number, record)
        if pending.ended:
            ring.ended(record)
            return COMPLETED
        return self.group.wait_directly(name, pending, opts, number, record)

    cdef object work_of(
        self, MemoryPending pending, str name, object result, object opts, long long number,
        long long record,
    ):
        """Return what an asynchronous call returns."""
        self.habit.begun(number)
        if pending.ended:
            ring.ended(record)
            return EndedWork(result, number, opts, self.group.timeout, self.habit)
        work = DirectWork(
            self.habit, self.group, name, AtItsEnd(result), [pending], self.group._limit(opts),
            number,
        )
        work.record = record
        ring.attach(record, pending.job)
        self.group.under_way.add(work)
        self.group.under_way.sweep_if_due()
        return work


cdef class AtItsEnd:
    """What is left of an operation that has nothing to do after its wait.

    Args:
        result: of the operation.
    """

    def __init__(self, result):
        self.result = result

    def __next__(self):
        raise StopIteration(self.result)

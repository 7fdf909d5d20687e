"""The short way of a collective: contiguous tensors on the CPU, ranks on one node.

It is the way of `OperationRunner` without what is rare. Whatever is not as usual (a hook, a
profiler, a mode, another dtype, an earlier call that has not ended) is handed to the group's own
method before anything is counted, compared or shown to other ranks, so that a call is the same for
them whichever way it takes.
"""

import torch
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack

from mpiddp.collectives.group_memory cimport GroupMemory, MemoryPending
from mpiddp.collectives.memory_jobs cimport (
    DEAL, EXCHANGE, GATHER_ALL, MEET, REDUCE_ALL, REDUCE_PARTS, REDUCE_TO_ROOT, SPREAD,
)
from mpiddp.collectives.patience cimport WaitHabit
from mpiddp.engine.forks cimport is_child
from mpiddp.process_group.call_table cimport digest_of
from mpiddp.torch_internals.tensors cimport dense_memory
from mpiddp.flight_recorder import ring
from mpiddp.flight_recorder.call_text import call_of
from mpiddp.collectives import group_memory
from mpiddp.mpi import datatypes, uncaught
from mpiddp.process_group import gpu_tensors
from mpiddp.process_group.call_table import FITS, code_of_dtype
from mpiddp.process_group.work import COMPLETED, DirectWork, EndedWork
from mpiddp.system.kernels import ELEMENTS
from mpiddp.torch_internals.tensors import code_of

# What hash() returns for a ReduceOp of them.
_SUM, _AVG = hash(dist.ReduceOp(dist.ReduceOp.SUM)), hash(dist.ReduceOp(dist.ReduceOp.AVG))

cdef int NO_ELEMENT = group_memory.NO_ELEMENT

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_profiler = torch.autograd.profiler


cdef Plan plan_of(int kind, unsigned long long name, int times) noexcept:
    """Return the plan of a call that compares the sizes of so many tensors."""
    cdef Plan plan
    plan.kind, plan.name, plan.times = kind, name, times
    plan.detail, plan.size, plan.dtype = -1, 0, 0
    plan.source = plan.target = NULL
    plan.root, plan.element, plan.way, plan.divisor = -1, NO_ELEMENT, 0, 1.0
    return plan


cdef class DirectWay:
    """The short way of one group's calls.

    Not collective, but its methods are. `DirectCalls` has those that torch calls.

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
        self.ways = {}
        self.asks_device = bool(torch.version.cuda or torch.version.hip)

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

    cdef list plain_parts(self, object tensors, int *dtype, list sizes):
        """Return the addresses of one tensor a rank, and append their sizes; None as `plain`.

        Args:
            dtype: of the parts before, -1 if these are the first. All have the same.
        """
        cdef int other = -1
        cdef size_t size = 0
        cdef char *address
        cdef list addresses = []
        if type(tensors) is not list or len(tensors) != self.memory.state.ranks:
            return None
        for tensor in tensors:
            address = self.plain(tensor, &other, &size)
            if dtype[0] < 0:
                dtype[0] = other
            if address == NULL or other != dtype[0]:
                return None
            addresses.append(<size_t>address)
            sizes.append(size)
        return addresses

    cdef bint reduces(self, object tensor, int dtype, object op, Plan *plan) except -1:
        """Whether tensors are reduced as they lie; then note what is compared of it, and how."""
        plan.detail = hash(op)
        if dtype in self.elements and (plan.detail == _SUM or plan.detail == _AVG):
            plan.dtype, plan.element = self.codes[dtype], self.elements[dtype]
            plan.divisor = self.memory.state.ranks if plan.detail == _AVG else 1.0
            return True
        key = dtype, plan.detail
        plan.way = self.ways[key] if key in self.ways else self.way_of(key, tensor.dtype, op)
        plan.dtype = self.codes[dtype]
        return plan.way != 0

    def way_of(self, key, dtype, op):
        """Return how numbers are combined where they lie, 0 where that does not do."""
        self.codes[key[0]] = code_of_dtype(dtype)
        self.ways[key] = 0
        try:
            how = datatypes.reduction(dtype, op)
        except TypeError:   # the long way says it
            return 0
        if how.dtype == dtype and not how.divides and not how.multiplies:
            self.ways[key] = how.way
        return self.ways[key]

    cdef bint fits(self, Plan *plan, list sizes) except -1:
        """Compare the call; count it if it fits, else the long way finds the same and says it.

        Args:
            sizes: the bytes that go to each rank, and then those that come from each.
        """
        cdef long long number = self.state.compared + 1
        cdef Py_ssize_t ranks = self.memory.state.ranks
        cdef unsigned long long digest = digest_of(
            plan.name, plan.detail, plan.size, plan.times, plan.dtype, number)
        if self.page.enter(number, digest) != FITS:
            return False
        if sizes is not None and self.page.exchange(
            number, self.memory.state.rank, sizes[:ranks], sizes[ranks:], self.state.here, plan.root
        ) >= 0:
            return False
        self.state.compared = number
        return True

    cdef object go(
        self, str name, object detail, object tensors, object opts, Plan *plan, list sources,
        list targets, list sizes, object kept, object result,
    ):
        """Carry out a call; return its Work, None where it does not fit."""
        cdef MemoryPending pending
        cdef long long record
        uncaught.take_part()
        with self.lock:
            if self.state.reason or not self.fits(plan, sizes):
                return None
            number = self.attributes["entered"] + 1
            self.attributes["entered"] = number
            last = self.attributes["last"] = call_of(name, detail, tensors)
            record = ring.begin(self.source, number, last, False, True)
            self.memory.at_once = not opts.asyncOp or self.habit.expects_wait()
            try:
                pending = self.begin(plan, sources, targets, sizes, kept)
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

    cdef MemoryPending begin(
        self, Plan *plan, list sources, list targets, list sizes, object kept
    ):
        cdef GroupMemory memory = self.memory
        if plan.kind == MEET:
            return memory.meet()
        if plan.kind == REDUCE_ALL or plan.kind == REDUCE_TO_ROOT:
            return memory.reduce(
                <size_t>plan.source, <size_t>plan.target, plan.size, plan.element, plan.way,
                plan.divisor, plan.root, kept)
        if plan.kind == REDUCE_PARTS:
            return memory.reduce_parts(
                sources, <size_t>plan.target, plan.size, plan.element, plan.way, plan.divisor,
                kept)
        if plan.kind == SPREAD:
            return memory.spread(<size_t>plan.source, plan.size, plan.root, kept)
        if plan.kind == GATHER_ALL:
            return memory.gather(<size_t>plan.source, targets, plan.size, kept)
        if plan.kind == EXCHANGE:
            return memory.exchange(sources, targets, sizes[0], kept)
        return memory.trade(
            sources, targets, sizes, kept, plan.root if plan.kind == DEAL else -1)

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

"""torch's calls that take the short way of a collective where nothing is unusual about them.

The methods have torch's names; those of `ProcessGroup` say what they do, and do whatever these
leave to them, see `DirectWay`.
"""

from torch._C._distributed_c10d import (
    AllgatherOptions, AllreduceOptions, AllToAllOptions, BarrierOptions, BroadcastOptions,
    DebugLevel, GatherOptions, ReduceOptions, ReduceScatterOptions, ScatterOptions, get_debug_level,
)

from mpiddp.collectives.memory_jobs cimport (
    DEAL, EXCHANGE, GATHER_ALL, MEET, REDUCE_ALL, REDUCE_PARTS, REDUCE_TO_ROOT, SPREAD, TRADE,
)
from mpiddp.process_group.direct_way cimport DirectWay, Plan, plan_of
from mpiddp.collectives import movement
from mpiddp.process_group.call_table import code_of_name

_ALL_REDUCE = code_of_name("all_reduce")
_REDUCE = code_of_name("reduce")
_REDUCE_SCATTER = code_of_name("reduce_scatter")
_BROADCAST = code_of_name("broadcast")
_ALL_GATHER = code_of_name("all_gather")
_GATHER = code_of_name("gather")
_SCATTER = code_of_name("scatter")
_ALL_TO_ALL = code_of_name("all_to_all")
_BARRIER = code_of_name("barrier")


def install(group):
    """Let a group whose ranks share memory take the short way, unless its calls are checked.

    Not collective.
    """
    if get_debug_level() == DebugLevel.DETAIL:
        return
    calls = DirectCalls(group)
    for name in (
        "allreduce", "reduce", "broadcast", "allgather", "all_gather_single", "_allgather_base",
        "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "gather", "scatter",
        "alltoall", "all_to_all_single", "alltoall_base", "barrier",
    ):
        setattr(group, name, getattr(calls, name))


cdef inline bint overlap(size_t first, size_t size, size_t second, size_t other) noexcept:
    return first < second + other and second < first + size


cdef bint overlaps_any(size_t address, size_t size, list others, size_t other) except -1:
    """Whether memory overlaps any other of one size."""
    for each in others:
        if overlap(address, size, each, other):
            return True
    return False


cdef bint overlaps_all(list sources, list sizes, list targets, list expected) except -1:
    """Whether any of these overlaps any of those."""
    cdef Py_ssize_t index, other
    for index in range(len(sources)):
        for other in range(len(targets)):
            if sizes[index] and expected[other] and overlap(
                sources[index], sizes[index], targets[other], expected[other]
            ):
                return True
    return False


cdef list divided(size_t address, list sizes):
    """Return the addresses of parts that lie one behind the other."""
    cdef size_t size
    addresses = []
    for size in sizes:
        addresses.append(address)
        address += size
    return addresses


cdef list bytes_of_rows(object tensor, object splits, size_t size, Py_ssize_t ranks):
    """Return the bytes of each rank's rows, None where they cannot be cut so.

    Args:
        splits: numbers of rows; none: all equal.
        size: bytes of the tensor.
    """
    cdef Py_ssize_t rows = len(tensor) if tensor.dim() else 1
    cdef size_t row
    if not splits:
        return [size // ranks] * ranks if rows % ranks == 0 else None
    if len(splits) != ranks or sum(splits) != rows or min(splits) < 0:
        return None
    row = size // rows
    return [row * <size_t>count for count in splits]


cdef class DirectCalls(DirectWay):
    """The short ways of one group's operations.

    Collective.

    Args:
        group: a ProcessGroup whose `state` has a page and memory.
    """

    def allreduce(self, *arguments, **named):
        cdef Plan plan = plan_of(REDUCE_ALL, _ALL_REDUCE, 1)
        cdef int dtype = -1
        if len(arguments) == 2 and not named:
            tensors, opts = arguments
            if self.may_go(opts, AllreduceOptions) and type(tensors) is list and len(tensors) == 1:
                plan.source = plan.target = self.plain(tensors[0], &dtype, &plan.size)
                op = opts.reduceOp
                if plan.source != NULL and self.reduces(tensors[0], dtype, op, &plan):
                    done = self.go(
                        "all_reduce", op, tensors, opts, &plan, None, None, None, tensors, tensors)
                    if done is not None:
                        return done
        return self.long_way("allreduce", arguments, named)

    def reduce(self, *arguments, **named):
        cdef Plan plan = plan_of(REDUCE_TO_ROOT, _REDUCE, 1)
        cdef int dtype = -1
        if len(arguments) == 2 and not named:
            tensors, opts = arguments
            if self.may_go(opts, ReduceOptions) and type(tensors) is list and len(tensors) == 1:
                plan.source = plan.target = self.plain(tensors[0], &dtype, &plan.size)
                how = opts.reduceOp, opts.rootRank
                plan.root = how[1]
                if (
                    plan.source != NULL and 0 <= plan.root < self.memory.state.ranks
                    and self.reduces(tensors[0], dtype, how[0], &plan)
                ):
                    plan.detail = hash(how)
                    done = self.go(
                        "reduce", how, tensors, opts, &plan, None, None, None, tensors, tensors)
                    if done is not None:
                        return done
        return self.long_way("reduce", arguments, named)

    def broadcast(self, *arguments, **named):
        cdef Plan plan = plan_of(SPREAD, _BROADCAST, 1)
        cdef int dtype = -1
        if len(arguments) == 2 and not named:
            tensors, opts = arguments
            if self.may_go(opts, BroadcastOptions) and type(tensors) is list and len(tensors) == 1:
                plan.source = self.plain(tensors[0], &dtype, &plan.size)
                root = opts.rootRank
                if plan.source != NULL and 0 <= root < self.memory.state.ranks:
                    plan.root = plan.detail = root
                    done = self.go(
                        "broadcast", root, tensors, opts, &plan, None, None, None, tensors, tensors)
                    if done is not None:
                        return done
        return self.long_way("broadcast", arguments, named)

    def allgather(self, *arguments, **named):
        cdef Plan plan = plan_of(GATHER_ALL, _ALL_GATHER, <int>self.memory.state.ranks)
        cdef int dtype = -1
        cdef size_t target
        cdef unsigned int rank
        if len(arguments) == 3 and not named:
            lists, inputs, opts = arguments
            if (
                self.may_go(opts, AllgatherOptions) and type(lists) is list and len(lists) == 1
                and type(inputs) is list and len(inputs) == 1
            ):
                plan.source = self.plain(inputs[0], &dtype, &plan.size)
                sizes = []
                targets = None
                if plan.source != NULL:
                    targets = self.plain_parts(lists[0], &dtype, sizes)
                if targets is not None:
                    for rank in range(self.memory.state.ranks):
                        target = targets[rank]
                        if sizes[rank] != plan.size or (
                            overlap(<size_t>plan.source, plan.size, target, plan.size)
                            and not (
                                rank == self.memory.state.rank and <size_t>plan.source == target)
                        ):
                            break
                    else:
                        done = self.go(
                            "all_gather", None, inputs, opts, &plan, None, targets, None,
                            arguments, movement.stacked(lists),
                        )
                        if done is not None:
                            return done
        return self.long_way("allgather", arguments, named)

    def all_gather_single(self, *arguments, **named):
        cdef Plan plan = plan_of(GATHER_ALL, _ALL_GATHER, 1)
        cdef int dtype = -1, other = -1
        cdef size_t source, target, whole = 0
        cdef unsigned int ranks = self.memory.state.ranks
        if len(arguments) == 3 and not named:
            output, input_, opts = arguments
            if self.may_go(opts, AllgatherOptions):
                plan.source = self.plain(input_, &dtype, &plan.size)
                target = <size_t>self.plain(output, &other, &whole)
                source = <size_t>plan.source
                if (
                    source and target and dtype == other and whole == plan.size * ranks
                    and (
                        not overlap(source, plan.size, target, whole)
                        or source == target + plan.size * self.memory.state.rank
                    )
                ):
                    done = self.go(
                        "all_gather", None, [input_], opts, &plan, None,
                        divided(target, [plan.size] * ranks), None, arguments, [output],
                    )
                    if done is not None:
                        return done
        return self.long_way("all_gather_single", arguments, named)

    def reduce_scatter(self, *arguments, **named):
        cdef Plan plan = plan_of(REDUCE_PARTS, _REDUCE_SCATTER, <int>self.memory.state.ranks)
        cdef int dtype = -1
        if len(arguments) == 3 and not named:
            outputs, lists, opts = arguments
            if (
                self.may_go(opts, ReduceScatterOptions) and type(lists) is list
                and len(lists) == 1 and type(outputs) is list and len(outputs) == 1
            ):
                plan.target = self.plain(outputs[0], &dtype, &plan.size)
                op = opts.reduceOp
                sizes = []
                sources = None
                if plan.target != NULL and self.reduces(outputs[0], dtype, op, &plan):
                    sources = self.plain_parts(lists[0], &dtype, sizes)
                if (
                    sources is not None and sizes == [plan.size] * len(sizes)
                    and not overlaps_any(<size_t>plan.target, plan.size, sources, plan.size)
                ):
                    done = self.go(
                        "reduce_scatter", op, outputs, opts, &plan, sources, None, None,
                        arguments, outputs,
                    )
                    if done is not None:
                        return done
        return self.long_way("reduce_scatter", arguments, named)

    def reduce_scatter_single(self, *arguments, **named):
        cdef Plan plan = plan_of(REDUCE_PARTS, _REDUCE_SCATTER, 1)
        cdef int dtype = -1, other = -1
        cdef size_t source, whole = 0
        cdef unsigned int ranks = self.memory.state.ranks
        if len(arguments) == 3 and not named:
            output, input_, opts = arguments
            if self.may_go(opts, ReduceScatterOptions):
                plan.target = self.plain(output, &dtype, &plan.size)
                source = <size_t>self.plain(input_, &other, &whole)
                op = opts.reduceOp
                if (
                    source and plan.target != NULL and dtype == other
                    and whole == plan.size * ranks and self.reduces(output, dtype, op, &plan)
                    and not overlap(source, whole, <size_t>plan.target, plan.size)
                ):
                    done = self.go(
                        "reduce_scatter", op, [output], opts, &plan,
                        divided(source, [plan.size] * ranks), None, None, arguments, [output],
                    )
                    if done is not None:
                        return done
        return self.long_way("reduce_scatter_single", arguments, named)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def gather(self, *arguments, **named):
        cdef Plan plan = plan_of(TRADE, _GATHER, 0)
        cdef int dtype = -1
        cdef size_t size = 0
        cdef Py_ssize_t rank = self.memory.state.rank, ranks = self.memory.state.ranks
        cdef char *source
        if len(arguments) == 3 and not named:
            lists, inputs, opts = arguments
            if (
                self.may_go(opts, GatherOptions)
                and type(lists) is list and type(inputs) is list and len(inputs) == 1
                and 0 <= opts.rootRank < ranks
            ):
                source = self.plain(inputs[0], &dtype, &size)
                root = plan.root = plan.detail = opts.rootRank
                sizes, expected = [0] * ranks, []
                sources, targets = [0] * ranks, None
                sizes[root], sources[root] = size, <size_t>source
                if rank != root:
                    targets, expected = [0] * ranks, [0] * ranks
                elif source != NULL and len(lists) == 1:
                    targets = self.plain_parts(lists[0], &dtype, expected)
                if (
                    source != NULL and targets is not None
                    and (rank != root or expected[root] == size)
                    and not overlaps_all(sources, sizes, targets, expected)
                ):
                    done = self.go(
                        "gather", root, inputs, opts, &plan, sources, targets, sizes + expected,
                        arguments, lists,
                    )
                    if done is not None:
                        return done
        return self.long_way("gather", arguments, named)

    def scatter(self, *arguments, **named):
        cdef Plan plan = plan_of(DEAL, _SCATTER, 0)
        cdef int dtype = -1
        cdef size_t size = 0
        cdef Py_ssize_t rank = self.memory.state.rank, ranks = self.memory.state.ranks
        cdef char *target
        if len(arguments) == 3 and not named:
            outputs, lists, opts = arguments
            if (
                self.may_go(opts, ScatterOptions)
                and type(lists) is list and type(outputs) is list and len(outputs) == 1
                and 0 <= opts.rootRank < ranks
            ):
                target = self.plain(outputs[0], &dtype, &size)
                root = plan.root = plan.detail = opts.rootRank
                sizes, expected = [], [0] * ranks
                sources, targets = None, [0] * ranks
                expected[root], targets[root] = size, <size_t>target
                if rank != root:
                    sources, sizes = [0] * ranks, [0] * ranks
                elif target != NULL and len(lists) == 1:
                    sources = self.plain_parts(lists[0], &dtype, sizes)
                if (
                    target != NULL and sources is not None
                    and (rank != root or sizes[root] == size)
                    and not overlaps_all(sources, sizes, targets, expected)
                ):
                    done = self.go(
                        "scatter", root, outputs, opts, &plan, sources, targets, sizes + expected,
                        arguments, outputs,
                    )
                    if done is not None:
                        return done
        return self.long_way("scatter", arguments, named)

    def alltoall(self, *arguments, **named):
        cdef Plan plan = plan_of(TRADE, _ALL_TO_ALL, 0)
        cdef int dtype = -1
        cdef Py_ssize_t rank = self.memory.state.rank
        if len(arguments) == 3 and not named:
            outputs, inputs, opts = arguments
            if self.may_go(opts, AllToAllOptions):
                sizes, expected = [], []
                sources = self.plain_parts(inputs, &dtype, sizes)
                targets = None
                if sources is not None:
                    targets = self.plain_parts(outputs, &dtype, expected)
                if (
                    targets is not None and sizes[rank] == expected[rank]
                    and not overlaps_all(sources, sizes, targets, expected)
                ):
                    done = self.go(
                        "all_to_all", None, inputs, opts, &plan, sources, targets,
                        sizes + expected, arguments, outputs,
                    )
                    if done is not None:
                        return done
        return self.long_way("alltoall", arguments, named)

    def all_to_all_single(self, *arguments, **named):
        if len(arguments) == 5 and not named:
            output, input_, output_splits, input_splits, opts = arguments
            if self.may_go(opts, AllToAllOptions):
                done = self.exchanged(output, input_, output_splits, input_splits, opts)
                if done is not None:
                    return done
        return self.long_way("all_to_all_single", arguments, named)

    alltoall_base = all_to_all_single

    cdef object exchanged(
        self, object output, object input_, object output_splits, object input_splits, object opts
    ):
        """Return the Work of an all_to_all of one tensor, None where it is not as usual."""
        cdef bint splits = bool(output_splits or input_splits)
        cdef Plan plan = plan_of(TRADE if splits else EXCHANGE, _ALL_TO_ALL, 0 if splits else 1)
        cdef int dtype = -1, other = -1
        cdef size_t source, target, whole = 0
        cdef Py_ssize_t rank = self.memory.state.rank, ranks = self.memory.state.ranks
        source = <size_t>self.plain(input_, &dtype, &plan.size)
        target = <size_t>self.plain(output, &other, &whole)
        if (
            not source or not target or dtype != other
            or overlap(source, plan.size, target, whole)
            or not splits and whole != plan.size
        ):
            return None
        sizes = bytes_of_rows(input_, input_splits, plan.size, ranks)
        expected = bytes_of_rows(output, output_splits, whole, ranks)
        if sizes is None or expected is None or sizes[rank] != expected[rank]:
            return None
        return self.go(
            "all_to_all", None, [input_], opts, &plan, divided(source, sizes),
            divided(target, expected), sizes + expected, (output, input_), [output],
        )

    def barrier(self, *arguments, **named):
        cdef Plan plan = plan_of(MEET, _BARRIER, 0)
        opts = arguments[0] if len(arguments) == 1 else named.get("opts")
        if len(arguments) + len(named) == 1 and self.may_go(opts, BarrierOptions):
            device = opts.device if self.asks_device else None
            if device is None or device.type == "cpu":
                done = self.go("barrier", None, (), opts, &plan, None, None, None, None, [])
                if done is not None:
                    return done
        return self.long_way("barrier", arguments, named)

"""torch.distributed's process group on mpi4py: the small collectives around DDP.

Gradients do not pass through here, they have the engine. Each collective starts a
nonblocking MPI call and waits for it with a time limit, on a communicator that is
used for nothing else, so a rank that never comes ends in an error on the others.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]  # stub lacks the last
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    DebugLevel,
    GatherOptions,
    ScatterOptions,
    Store,
    Work,
    _create_work_from_future,
    get_debug_level,
)

from mpiddp import agreement, datatypes, tensors_around_mpi
from mpiddp.abort import abort_job
from mpiddp.compilation import run_as_it_is
from mpiddp.engine import Channel, Engine
from mpiddp.monitored_barrier import MonitoredBarrier
from mpiddp.operation import Operation, operation
from mpiddp.roll_call import RollCall
from mpiddp.state_broadcast import StateBroadcast
from mpiddp.transport import open_channel

Result = TypeVar("Result")

_AVG = dist.ReduceOp.AVG
_PREMUL_SUM = dist.ReduceOp.PREMUL_SUM

# How a waiting rank gives its core away: tests at full speed, then with
# yields, then with naps of a sixteenth of the wait so far.
_SPINS = 50
_YIELD_SECONDS = 1e-3
_SHORTEST_NAP = 50e-6
_LONGEST_NAP = 1e-3


# Memory that MPI may still write to after a time limit was reached.
_abandoned: list[tuple[MPI.Request, tuple[torch.Tensor, ...]]] = []


@run_as_it_is
class ProcessGroup(dist.ProcessGroup):
    """The ranks of one communicator, as torch.distributed sees them.

    Collective over `communicator`.

    Args:
        communicator: an mpi4py intracommunicator that this group owns and frees.
        engine: the process's progress engine.
        timeout: how long a collective may wait for other ranks.
        store: the torch.distributed store that the group was made with.
    """

    def __init__(
        self,
        communicator: MPI.Intracomm,
        engine: Engine,
        timeout: timedelta,
        store: Store | None = None,
    ) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())  # type: ignore[call-arg]
        self.communicator: MPI.Comm = communicator
        self.engine = engine
        self.timeout = timeout
        self._store = store
        self._channels: list[Channel] = []
        self._transports: list[str] = []
        self._leased: set[int] = set()
        self._state_broadcast: StateBroadcast | None = None
        self._name = ""
        # How many collectives this rank has entered, and the last: for those who miss it.
        self.entered = 0
        self.last: Operation | None = None
        self.roll_call: RollCall | None = None
        # Its ranks' ranks in the world.
        self.world_ranks: tuple[int, ...] = tuple(range(self.size()))
        self._monitored_barrier: MonitoredBarrier | None = None
        # As torch wraps other backends: where the setting was made before the group.
        self._checked = get_debug_level() == DebugLevel.DETAIL
        communicator.Set_name("mpiddp")

    # What torch.distributed asks about the group.

    def getBackendName(self) -> str:
        """Return "mpiddp". Not collective."""
        return "mpiddp"

    @property
    def group_name(self) -> str:
        """The name that torch.distributed gave to this group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def get_group_store(self) -> Store | None:
        """Return the store that this group was made with. Not collective."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a collective may wait for other ranks. Not collective."""
        self.timeout = timeout

    def shutdown(self) -> None:
        """Free the group's communicators.

        Collective. Harmless when called twice.
        """
        for channel in self._channels:
            if channel.idle and channel.communicator is not None:
                self.engine.close_channel(channel)
                if channel.transport is not None:
                    channel.transport.free()
                channel.communicator.Free()
        self._channels.clear()
        if self._state_broadcast is not None:
            self._state_broadcast.free()
            self._state_broadcast = None
        if self.communicator != MPI.COMM_NULL:
            self.communicator.Free()

    def forget_communicators(self) -> None:
        """Make shutdown free nothing, for an exit that is not collective. Not collective."""
        self._channels.clear()
        self._state_broadcast = None
        self.communicator = MPI.COMM_NULL

    def abort(self) -> None:
        """End every rank of the job, as MPI_Abort does. Not collective."""
        abort_job(1)

    # Collectives.

    def broadcast(self, tensors: list[torch.Tensor], opts: BroadcastOptions) -> Work:
        """Copy each tensor from ``opts.rootRank`` to all ranks, as dist.broadcast does.

        Collective. Any dtype, any strides.
        """
        for tensor in tensors:
            dense = self._dense(tensor)
            self._enter("broadcast", f"root {opts.rootRank}", [tensor], opts)
            request = self.communicator.Ibcast(datatypes.buffer_of(dense), root=opts.rootRank)
            self.wait_for(request, "broadcast", opts, dense)
            tensors_around_mpi.write_back(dense, tensor)
        return _completed(tensors)

    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions | None = None) -> Work:
        """Reduce each tensor over all ranks in place, as dist.all_reduce does.

        Collective. float16 and bfloat16 are reduced in float32 and rounded once; sparse COO
        tensors are summed.

        Raises:
            TypeError: the dtype has no such reduction.
        """
        op = opts.reduceOp if opts is not None else dist.ReduceOp(dist.ReduceOp.SUM)
        with torch.no_grad():
            for tensor in tensors:
                if tensor.layout is torch.sparse_coo:
                    self._allreduce_sparse(tensor, op, opts)
                else:
                    self._allreduce_dense(tensor, op, opts)
        return _completed(tensors)

    def allreduce_coalesced(
        self, tensors: list[torch.Tensor], opts: AllreduceCoalescedOptions
    ) -> Work:
        """Reduce several tensors. Collective."""
        return self.allreduce(tensors, opts)

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """Gather each input from all ranks into a list, as dist.all_gather does.

        Collective. Any dtype; the tensors of the ranks may differ in size. The future of the Work
        holds for each input, where all are of one shape, one tensor of all ranks', as with NCCL:
        torch's quantization hooks index it by rank.

        Raises:
            ValueError: a list has not one tensor for each rank.
        """
        gathered: list[Any] = []
        for output, tensor in zip(outputs, inputs, strict=True):
            if len(output) != self.size():
                raise ValueError(
                    f"all_gather needs {self.size()} output tensors, one a rank, not {len(output)}"
                )
            own = output[self.rank()]
            if own.dtype != tensor.dtype or own.numel() != tensor.numel():
                raise ValueError(
                    f"all_gather of {tensor.numel()} elements of {tensor.dtype} needs an output of "
                    f"that size and dtype for rank {self.rank()}, not {own.numel()} of {own.dtype}"
                )
            source = self._dense(tensor)
            counts = [part.numel() * part.element_size() for part in output]
            flat = torch.empty(sum(counts), dtype=torch.uint8)
            self._enter("all_gather", "", output, opts)
            request = self.communicator.Iallgatherv(
                datatypes.buffer_of(source),
                [datatypes.buffer_of(flat)[0], counts, None, MPI.BYTE],
            )
            self.wait_for(request, "all_gather", opts, source, flat)
            tensors_around_mpi.unpack(flat, output)
            alike = all(p.shape == tensor.shape and p.dtype == tensor.dtype for p in output)
            gathered.append(
                flat.view(tensor.dtype).view(self.size(), *tensor.shape) if alike else output
            )
        return _completed(gathered)

    def _allgather_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        opts: AllgatherOptions | None = None,
    ) -> Work:
        source = self._dense(tensor)
        target = self._dense(output)
        if target.numel() != source.numel() * self.size():
            raise ValueError(
                f"all_gather of {source.numel()} elements over {self.size()} ranks needs an "
                f"output of {source.numel() * self.size()} elements, not {target.numel()}"
            )
        if target.dtype != source.dtype:
            raise ValueError(f"all_gather of {source.dtype} into an output of {target.dtype}")
        self._enter("all_gather_single", "", [tensor], opts)
        request = self.communicator.Iallgather(
            datatypes.buffer_of(source), datatypes.buffer_of(target)[0]
        )
        self.wait_for(request, "all_gather", opts, source, target)
        tensors_around_mpi.write_back(target, output)
        return _completed([output])

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions | None = None
    ) -> Work:
        """Gather equal inputs into one output tensor, as dist.all_gather_single does.

        Collective. Any dtype.

        Raises:
            ValueError: the output has not the size of all inputs.
        """
        return self._allgather_base(output, input, opts)

    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: GatherOptions,
    ) -> Work:
        """Gather each input from all ranks into a list on one, as dist.gather does.

        Collective. Any dtype; the tensors of the ranks may differ in size.

        Raises:
            ValueError: the list on ``opts.rootRank`` has not one tensor for each rank.
        """
        root = opts.rootRank
        for index, tensor in enumerate(inputs):
            source = self._dense(tensor)
            parts = outputs[index] if self.rank() == root else []
            target, flat = self._pieces("gather", parts, root)
            self._enter(
                "gather",
                f"root {root}",
                [tensor],
                opts,
                may_differ=True,
                elements=(self._only(root, tensor), _sizes(parts, self.size())),
            )
            request = self.communicator.Igatherv(datatypes.buffer_of(source), target, root=root)
            self.wait_for(request, "gather", opts, source, flat)
            tensors_around_mpi.unpack(flat, parts)
        return _completed(outputs)

    def scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: ScatterOptions,
    ) -> Work:
        """Give each rank its tensor of a list on one of them, as dist.scatter does.

        Collective. Any dtype; the tensors of the ranks may differ in size.

        Raises:
            ValueError: the list on ``opts.rootRank`` has not one tensor for each rank.
        """
        root = opts.rootRank
        for index, tensor in enumerate(outputs):
            target = self._dense(tensor)
            parts = inputs[index] if self.rank() == root else []
            source, flat = self._pieces("scatter", parts, root)
            if parts:
                flat.copy_(
                    torch.cat([tensors_around_mpi.bytes_of(self._dense(part)) for part in parts])
                )
            self._enter(
                "scatter",
                f"root {root}",
                [tensor],
                opts,
                may_differ=True,
                elements=(_sizes(parts, self.size()), self._only(root, tensor)),
            )
            request = self.communicator.Iscatterv(source, datatypes.buffer_of(target), root=root)
            self.wait_for(request, "scatter", opts, target, flat)
            tensors_around_mpi.write_back(target, tensor)
        return _completed(outputs)

    def barrier(self, opts: BarrierOptions | None = None) -> Work:
        """Wait until all ranks are here. Collective."""
        self._enter("barrier", "", [], opts)
        self.wait_for(self.communicator.Ibarrier(), "barrier", opts)
        return _completed([])

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all ranks are here, or name who is not, as dist.monitored_barrier does.

        Collective.

        Raises:
            RuntimeError: a rank did not come within `timeout`, by default the group's.
        """
        self._enter("monitored_barrier", "", [], checked=False)
        if self._monitored_barrier is None:
            self._monitored_barrier = MonitoredBarrier(self)
        self._monitored_barrier(self.timeout if timeout is None else timeout, wait_all_ranks)

    def allgather_objects(self, value: Result) -> list[Result]:
        """Return the picklable `value` of every rank, by rank. Collective."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.size(), dtype=torch.int64)
        self.all_gather_single(sizes, torch.tensor([data.numel()]))
        pieces = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        self.allgather([pieces], [data])
        return [pickle.loads(piece.numpy().tobytes()) for piece in pieces]

    def broadcast_state(self, tensors: list[torch.Tensor]) -> bool:
        """Make `tensors` equal to rank 0's in shared memory; return whether that was possible.

        Collective.
        """
        if self._state_broadcast is None:
            self._state_broadcast = StateBroadcast(self, self.communicator)
        self._enter("broadcast of parameters or buffers", "", tensors)
        return self._state_broadcast(tensors)

    # Queues for gradients.

    def lease_channel(self, transport: str = "auto") -> Channel:
        """Return a queue of the engine with a communicator of its own.

        Collective. Communicators are a limited resource and may only be freed together, while
        reducers are garbage-collected at a different time on each rank: so channels are kept
        and leased again, and the ranks agree on one that is idle on all of them.

        Args:
            transport: one of `mpiddp.transport.TRANSPORTS`, the same on all ranks.
        """
        free = torch.ones(len(self._channels), dtype=torch.uint8)
        for index, channel in enumerate(self._channels):
            free[index] = (
                index not in self._leased and channel.idle and self._transports[index] == transport
            )
        if len(self._channels):
            opts = AllreduceOptions()
            opts.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
            self.allreduce([free], opts)
        candidates = free.nonzero().flatten().tolist()
        if candidates:
            index = candidates[0]
        else:
            index = len(self._channels)
            self._channels.append(self._open_channel(transport))
            self._transports.append(transport)
        self._leased.add(index)
        return self._channels[index]

    def return_channel(self, channel: Channel) -> None:
        """Give a leased channel back. Not collective."""
        if channel in self._channels:
            self._leased.discard(self._channels.index(channel))

    def _open_channel(self, transport: str) -> Channel:
        communicator = self.communicator.Dup()
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
        communicator.Set_name(f"mpiddp gradients {len(self._channels)}")
        return open_channel(self.engine, communicator, transport)

    # Within.

    def _pieces(
        self, name: str, parts: list[torch.Tensor], root: int
    ) -> tuple[list[Any] | None, torch.Tensor]:
        """Return memory for one tensor a rank, as MPI takes it and as bytes; none but on `root`."""
        if self.rank() != root:
            return None, torch.empty(0, dtype=torch.uint8)
        if len(parts) != self.size():
            raise ValueError(f"{name} needs {self.size()} tensors, one a rank, not {len(parts)}")
        counts = [part.numel() * part.element_size() for part in parts]
        flat = torch.empty(sum(counts), dtype=torch.uint8)
        return [datatypes.buffer_of(flat)[0], counts, None, MPI.BYTE], flat

    def _enter(
        self,
        name: str,
        detail: str,
        tensors: Sequence[torch.Tensor],
        opts: Any = None,
        may_differ: bool = False,
        elements: tuple[Sequence[int], Sequence[int]] | None = None,
        checked: bool = True,
    ) -> None:
        """Count a collective, before MPI hears of it, and see whether all ranks mean the same."""
        self.entered += 1
        self.last = operation(name, detail, tensors)
        if checked and self._checked:
            agreement.check(self, name, detail, tensors, opts, may_differ, elements)

    def _only(self, rank: int, tensor: torch.Tensor) -> list[int]:
        return [tensor.numel() if other == rank else 0 for other in range(self.size())]

    def _dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` if MPI can use its memory as it is, else a contiguous copy."""
        if tensor.device.type != "cpu":
            raise ValueError(
                f"this version of mpiddp moves CPU tensors only, not a tensor on {tensor.device}"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(f"cannot move a tensor of layout {tensor.layout} over MPI")
        return tensor.detach().contiguous().resolve_conj().resolve_neg()

    def _allreduce_dense(self, tensor: torch.Tensor, op: dist.ReduceOp, opts: Any) -> None:
        how = datatypes.reduction(tensor.dtype, op)
        kind = getattr(op, "op", op)
        total = self._dense(tensor).to(how.dtype)
        # Out of place: Open MPI's nonblocking all-reduce is twice as fast then.
        contribution = total.clone()
        if kind == _PREMUL_SUM:
            tensors_around_mpi.multiply(contribution, op)
        self._enter("all_reduce", str(getattr(kind, "name", kind)), [tensor], opts)
        request = self.communicator.Iallreduce(
            datatypes.buffer_of(contribution, how.datatype),
            datatypes.buffer_of(total, how.datatype),
            op=how.operation,
        )
        self.wait_for(request, "all_reduce", opts, contribution, total)
        if kind == _AVG:
            tensors_around_mpi.divide(total, self.size())
        tensors_around_mpi.write_back(total, tensor)

    def _allreduce_sparse(self, tensor: torch.Tensor, op: dist.ReduceOp, opts: Any) -> None:
        if getattr(op, "op", op) != dist.ReduceOp.SUM:
            raise TypeError("sparse tensors can only be summed over ranks, with ReduceOp.SUM")
        own = tensor.detach().coalesce()
        everyone = torch.zeros(2 * self.size(), dtype=torch.int64)
        self.all_gather_single(everyone, torch.tensor([own._nnz(), own.sparse_dim()]), opts)
        counts, sparse_dims = everyone.view(-1, 2).t().tolist()
        # A tensor without entries may be split in sparse and dense dimensions anyhow.
        splits = {dim for count, dim in zip(counts, sparse_dims, strict=True) if count}
        if not splits:
            return
        if len(splits) > 1:
            raise ValueError(f"the ranks' sparse tensors differ in sparse_dim: {sorted(splits)}")
        sparse_dim = splits.pop()
        indices, values = own.indices().contiguous(), own.values().contiguous()
        if not own._nnz():
            indices = torch.empty(sparse_dim, 0, dtype=torch.int64)
            values = torch.empty(0, *tensor.shape[sparse_dim:], dtype=tensor.dtype)
        all_indices = [torch.empty(sparse_dim, count, dtype=torch.int64) for count in counts]
        all_values = [torch.empty(count, *values.shape[1:], dtype=values.dtype) for count in counts]
        self.allgather([all_indices, all_values], [indices, values], opts)
        # Summed in order of ranks by coalesce(), so all ranks get the same bits.
        total = torch.sparse_coo_tensor(
            torch.cat(all_indices, dim=1),
            torch.cat(all_values),
            tensor.shape,
            check_invariants=False,
        ).coalesce()
        tensor.copy_(total)

    def wait_for(self, request: MPI.Request, name: str, opts: Any, *memory: torch.Tensor) -> None:
        """Wait for `request` of the collective `name`, which uses `memory`. Not collective.

        The core is not burnt: with more ranks than cores the others need it to come here.
        """
        for _ in range(_SPINS):
            if request.Test():
                return
        limit = self._limit(opts)
        began = time.monotonic()
        while not request.Test():
            # Other ranks may wait for a bucket of this one before they come here.
            self.engine.progress()
            waited = time.monotonic() - began
            if waited > limit:
                _abandoned.append((request, memory))
                raise self.timed_out(name, limit)
            if waited < _YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(min(max(waited / 16, _SHORTEST_NAP), _LONGEST_NAP))

    def timed_out(self, name: str, seconds: float) -> RuntimeError:
        """Return the error of a collective `name` that waited in vain. Not collective."""
        return RuntimeError(
            f"rank {self.rank()} of {self.size()}: {name} on process group "
            f"{self.group_name or 'world'!r} has waited {seconds:g} s for other ranks. "
            f"{self.explain_missing()}"
        )

    def explain_missing(self) -> str:
        """Return which ranks keep the last collective waiting; it may take seconds.

        Not collective.
        """
        if self.roll_call is None:
            return "Did all ranks call it, in the same order, and are they still alive?"
        return f"{self.roll_call.explain(self)}."

    def _limit(self, opts: Any) -> float:
        """Return the time limit in seconds: the call's own, or the group's."""
        own = getattr(opts, "timeout", None)
        # torch marks "not given" by a negative time.
        limit = own if own is not None and own > timedelta(0) else self.timeout
        return float(limit.total_seconds())


def _completed(result: Iterable[Any]) -> Work:
    """Return the Work of an operation that is over, with its result in a future."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    work: Work = _create_work_from_future(future)
    return work


def _sizes(parts: Sequence[torch.Tensor], size: int) -> list[int]:
    return [part.numel() for part in parts] or [0] * size

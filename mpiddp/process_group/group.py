"""torch.distributed's process group on MPI: every operation, async or not, on CPU and GPU.

Gradients of DistributedDataParallel do not pass through here, but through the engine. Each
operation starts nonblocking MPI calls on a communicator that is used for nothing else, and has a
time limit: if a rank never comes, the others raise an error.

The methods have torch's names; reductions, movement and point_to_point implement them, as
Note [An operation is a generator] says, and for tensors on a GPU Note [Operations on copies].
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
)
from torch._C._distributed_c10d import Work as TorchWork

from mpiddp.collectives import movement, point_to_point, reductions, sparse
from mpiddp.collectives.operation import Operation
from mpiddp.engine import forks
from mpiddp.engine.engine import Channel
from mpiddp.engine.requests import Requests
from mpiddp.process_group.call_check import by_rank, by_rows, for_one
from mpiddp.process_group.call_hooks import CallHooks
from mpiddp.process_group.futures import FutureCompleter
from mpiddp.process_group.gpu_tensors import wait_for_stream
from mpiddp.process_group.monitored_barrier import MonitoredBarrier
from mpiddp.process_group.overloads import also_called_with
from mpiddp.process_group.state_broadcast import StateBroadcast
from mpiddp.process_group.work import with_peer
from mpiddp.torch_internals.compiler import skip_compilation
from mpiddp.transports.channel_pool import ChannelPool
from mpiddp.watch.watchdog import ended_with_block

Result = TypeVar("Result")

# Whether torch is built for GPUs; cheaper to ask than to read the options of a barrier.
_HAS_GPUS = bool(torch.version.cuda or torch.version.hip)


@skip_compilation
class ProcessGroup(CallHooks):
    """The ranks of one communicator, as torch.distributed sees them.

    Collective over `communicator`.

    Args:
        communicator: an mpi4py intracommunicator that this group owns and frees.
        requests: those of the process.
        completion: completes the futures of the process.
        timeout: how long an operation may wait for other ranks.
        store: the torch.distributed store that the group was made with.
    """

    def __init__(
        self,
        communicator: MPI.Intracomm,
        requests: Requests,
        completion: FutureCompleter,
        timeout: timedelta,
        store: Store | None = None,
    ) -> None:
        super().__init__(communicator, requests, completion, timeout)
        self.channel_pool = ChannelPool(self)
        self._store = store
        self._state_broadcast: StateBroadcast | None = None
        self._monitored_barrier: MonitoredBarrier | None = None

    def get_group_store(self) -> Store | None:
        """Return the store that this group was made with. Not collective."""
        return self._store

    def shutdown(self) -> None:
        """Free the group's communicators, unless it is broken.

        Collective. Harmless when called twice, and in a forked child.
        """
        if forks.forked():
            return
        if self.state.broken:
            # What was sent in vain is still under way. A new communicator would receive it: MPICH
            # tells messages apart by a number of the communicator, which it uses again.
            self.forget_communicators()
        self.channel_pool.free()
        if self._state_broadcast is not None:
            self._state_broadcast.free()
            self._state_broadcast = None
        super().shutdown()

    def forget_communicators(self) -> None:
        """Make shutdown free nothing, for an exit that is not collective. Not collective."""
        self.channel_pool.forget()
        self._state_broadcast = None
        super().forget_communicators()

    # Reductions. 16-bit floats are reduced in float32 and rounded once.

    @also_called_with(AllreduceOptions, "op", "timeout")
    def allreduce(
        self, tensors: list[torch.Tensor], opts: AllreduceOptions | None = None
    ) -> TorchWork:
        """Reduce each tensor over all ranks in place, as dist.all_reduce does.

        Collective. Sparse COO tensors are summed, before the call returns.

        Raises:
            TypeError: the dtype has no such reduction.
        """
        op = opts.reduceOp if opts is not None else dist.ReduceOp(dist.ReduceOp.SUM)
        for tensor in tensors:
            if tensor.layout is torch.sparse_coo:
                sparse.all_reduce(self, tensors, op, opts)
                return self._start("all_reduce", _nothing, (tensors,), opts)
        return self._start("all_reduce", reductions.all_reduce, (tensors, op), opts, tensors, op)

    def allreduce_coalesced(
        self, tensors: list[torch.Tensor], opts: AllreduceCoalescedOptions | None = None
    ) -> TorchWork:
        """Reduce several tensors, those of one dtype as one. Collective."""
        op = opts.reduceOp if opts is not None else dist.ReduceOp(dist.ReduceOp.SUM)
        if len(tensors) > 1 and len({tensor.dtype for tensor in tensors}) == 1:
            function = reductions.all_reduce_together
        else:
            function = reductions.all_reduce
        return self._start("all_reduce_coalesced", function, (tensors, op), opts, tensors, op)

    @also_called_with(ReduceOptions, "root", "op", "timeout")
    def reduce(self, tensors: list[torch.Tensor], opts: ReduceOptions) -> TorchWork:
        """Reduce each tensor to ``opts.rootRank``, as dist.reduce does. Collective.

        The tensors of the other ranks stay as they are.

        Raises:
            TypeError: the dtype has no such reduction.
        """
        how = (opts.reduceOp, opts.rootRank)
        return self._start("reduce", reductions.reduce, (tensors, *how), opts, tensors, how)

    @also_called_with(ReduceScatterOptions, "op", "timeout", tensors=2)
    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: ReduceScatterOptions,
    ) -> TorchWork:
        """Reduce lists of one tensor per rank, each to its rank, as dist.reduce_scatter does.

        Collective. The tensors of a list may differ in size.

        Raises:
            ValueError: a list has a wrong number of tensors, or this rank's tensors differ in size.
            TypeError: the dtype has no such reduction, or dtypes differ.
        """
        return self._start(
            "reduce_scatter",
            reductions.reduce_scatter,
            (outputs, inputs, opts.reduceOp),
            opts,
            outputs,
            opts.reduceOp,
            compared=lambda: _flat(inputs),
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: ReduceScatterOptions | None = None
    ) -> TorchWork:
        """Reduce a tensor and give each rank an equal part, as dist.reduce_scatter_tensor does.

        Collective. Raises what `reduce_scatter` does.
        """
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: ReduceScatterOptions | None = None,
    ) -> TorchWork:
        """Do several `reduce_scatter_single`. Collective."""
        op = opts.reduceOp if opts is not None else dist.ReduceOp(dist.ReduceOp.SUM)
        function = reductions.reduce_scatter_single
        return self._start("reduce_scatter", function, (outputs, inputs, op), opts, outputs, op)

    # Older names, which torch's C++ looks up; their parameters have other names.
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # Data movement. Any dtype, any strides.

    @also_called_with(BroadcastOptions, "root", "timeout")
    def broadcast(
        self, tensors: list[torch.Tensor], opts: BroadcastOptions | None = None
    ) -> TorchWork:
        """Copy each tensor from ``opts.rootRank`` to all ranks, as dist.broadcast does.

        Collective.
        """
        root = opts.rootRank if opts is not None else 0
        function = movement.broadcast
        return self._start("broadcast", function, (tensors, root), opts, tensors, root)

    @also_called_with(AllgatherOptions, "timeout", tensors=2)
    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> TorchWork:
        """Gather each input from all ranks into a list, as dist.all_gather does.

        Collective. The tensors of the ranks may differ in size.

        Raises:
            ValueError: a list has a wrong number of tensors, or this rank's differs from its input.
        """
        return self._start(
            "all_gather",
            movement.all_gather,
            (outputs, inputs),
            opts,
            inputs,
            compared=lambda: _flat(outputs),
        )

    def allgather_coalesced(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> TorchWork:
        """Gather several inputs; ``outputs[rank][i]`` is that rank's i-th. Collective."""
        movement.check_number(self, "all_gather_coalesced", "lists of output", outputs)
        by_input = [list(parts) for parts in zip(*outputs, strict=True)]
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions | None = None
    ) -> TorchWork:
        """Gather equal inputs into one output tensor, as dist.all_gather_into_tensor does.

        Collective.

        Raises:
            ValueError: the output's size is not that of all inputs together, or its dtype differs.
        """
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> TorchWork:
        """Do several `all_gather_single`. Collective."""
        function = movement.all_gather_single
        return self._start("all_gather", function, (outputs, inputs), opts, inputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    @also_called_with(GatherOptions, "root", "timeout", tensors=2)
    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: GatherOptions,
    ) -> TorchWork:
        """Gather each input from all ranks into a list on one rank, as dist.gather does.

        Collective. The tensors of the ranks may differ in size.

        Raises:
            ValueError: the list on ``opts.rootRank`` does not have one tensor per rank.
        """
        root = opts.rootRank
        return self._start(
            "gather",
            movement.gather,
            (outputs, inputs, root),
            opts,
            inputs,
            root,
            elements=lambda: (for_one(self, root, inputs), by_rank(self, outputs)),
        )

    def gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: GatherOptions
    ) -> TorchWork:
        """Gather equal inputs into one output on one rank, as dist.gather_single does. Collective.

        Raises:
            ValueError: the output's size is not that of all inputs together, or its dtype differs.
        """
        root = opts.rootRank
        what = (output, input, root)
        return self._start("gather", movement.gather_single, what, opts, [input], root)

    gather_into_tensor = gather_single

    @also_called_with(ScatterOptions, "root", "timeout", tensors=2)
    def scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: ScatterOptions,
    ) -> TorchWork:
        """Give each rank its tensor from a list on one rank, as dist.scatter does.

        Collective. The tensors of the ranks may differ in size.

        Raises:
            ValueError: the list on ``opts.rootRank`` does not have one tensor per rank.
        """
        root = opts.rootRank
        return self._start(
            "scatter",
            movement.scatter,
            (outputs, inputs, root),
            opts,
            outputs,
            root,
            elements=lambda: (by_rank(self, inputs), for_one(self, root, outputs)),
        )

    @also_called_with(AllToAllOptions, "timeout", tensors=2)
    def alltoall(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: AllToAllOptions | None = None,
    ) -> TorchWork:
        """Send each rank its tensor of a list, receive one from each, as dist.all_to_all does.

        Collective. Tensors may differ in size.

        Raises:
            ValueError: a list does not have one tensor per rank.
        """
        return self._start(
            "all_to_all",
            movement.all_to_all,
            (outputs, inputs),
            opts,
            inputs,
            elements=lambda: (by_rank(self, [inputs]), by_rank(self, [outputs])),
        )

    @also_called_with(AllToAllOptions, "timeout", tensors=4)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: AllToAllOptions | None = None,
    ) -> TorchWork:
        """Send rows to each rank, receive some from each, as dist.all_to_all_single does.

        Collective. Splits are numbers of rows; none: all equal.

        Raises:
            RuntimeError: the rows cannot be divided so.
            TypeError: the dtypes differ.
        """
        return self._start(
            "all_to_all",
            movement.all_to_all_single,
            (output, input, output_split_sizes, input_split_sizes),
            opts,
            [input],
            elements=lambda: (
                by_rows(self, input, input_split_sizes),
                by_rows(self, output, output_split_sizes),
            ),
            # MPI's own call, where all parts are equal.
            agreed=() if input_split_sizes or output_split_sizes else [input],
        )

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    @also_called_with(BarrierOptions, "timeout", tensors=0)
    def barrier(self, opts: BarrierOptions | None = None) -> TorchWork:
        """Wait until all ranks are here.

        Collective. With a GPU in `opts`, first synchronise its current stream.
        """
        device = opts.device if _HAS_GPUS and opts is not None else None
        if device is not None and device.type != "cpu":
            wait_for_stream(self, "barrier", device)
        return self._start("barrier", movement.barrier, (), opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all ranks are here, or name who is not, as dist.monitored_barrier does.

        Collective.

        Raises:
            RuntimeError: a rank did not come within `timeout`, by default the group's.
        """
        forks.check("monitored_barrier")
        with ended_with_block(self._enter("monitored_barrier")):
            if self._monitored_barrier is None:
                self._monitored_barrier = MonitoredBarrier(self)
            self._monitored_barrier(self.timeout if timeout is None else timeout, wait_all_ranks)

    # Messages. Not collective, except that the other rank must take part.

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> TorchWork:
        """Send tensors to a rank of the group, as dist.isend does. Not collective.

        Raises:
            ValueError: there is no such rank, or MPI has no such tag.
        """
        what = ("send", point_to_point.send, (tensors, to, tag), None, tensors)
        return with_peer(self._start(*what, message=True), to)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> TorchWork:
        """Receive tensors from a rank of the group, as dist.irecv does. Not collective.

        The Work fails with a RuntimeError if the message has another size than the tensor.

        Raises:
            ValueError: there is no such rank, or MPI has no such tag.
        """
        function = point_to_point.receive
        name = "recvAnySource" if source == point_to_point.ANY_SOURCE else "recv"
        what = (name, function, (tensors, source, tag), None, tensors)
        return with_peer(self._start(*what, message=True), source)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> TorchWork:
        """Receive tensors from any rank; the Work's source_rank says from which.

        Not collective. Raises what `recv` does.
        """
        return self.recv(tensors, point_to_point.ANY_SOURCE, tag)

    # For the rest of mpiddp.

    def allgather_objects(self, value: Result) -> list[Result]:
        """Return the picklable `value` of every rank, by rank. Collective."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.size(), dtype=torch.int64, device="cpu")
        at_once = AllgatherOptions()
        at_once.asyncOp = False
        self.all_gather_single(sizes, torch.tensor([data.numel()], device="cpu"), at_once)
        pieces = [torch.empty(int(size), dtype=torch.uint8, device="cpu") for size in sizes]
        self.allgather([pieces], [data], at_once)
        # Of ranks of this job.
        return [pickle.loads(piece.numpy().tobytes()) for piece in pieces]  # noqa: S301  # of the job

    def broadcast_state(self, tensors: list[torch.Tensor]) -> bool:
        """Make `tensors` equal to rank 0's in shared memory; return whether that was possible.

        Collective.
        """
        forks.check("a forward that copies rank 0's buffers to all ranks")
        with ended_with_block(self._enter("broadcast of parameters or buffers", tensors)):
            if self._state_broadcast is None:
                self._state_broadcast = StateBroadcast(self, self.communicator)
            return self._state_broadcast(tensors)

    def acquire_channels(
        self, transport: str, parameters: Sequence[torch.Tensor]
    ) -> dict[torch.device, Channel]:
        """Return channels for gradients, see `ChannelPool.acquire`. Collective."""
        forks.check("DistributedDataParallel")
        return self.channel_pool.acquire(transport, parameters)

    def release_channels(self, channels: dict[torch.device, Channel]) -> None:
        """Give channels for gradients back. Not collective."""
        self.channel_pool.release(channels)


def _flat(lists: Sequence[Sequence[torch.Tensor]]) -> Iterator[torch.Tensor]:
    return (tensor for tensors in lists for tensor in tensors)


def _nothing(group: ProcessGroup, result: Any) -> Operation:
    yield []
    return result

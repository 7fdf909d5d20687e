"""Choose how the gradients of a module travel: the one place that knows all transports.

For gradients on a GPU `gpu_choice` chooses; its "staging" uses one of the transports here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from mpiddp import settings
from mpiddp.engine.memory import BucketMemory, GpuMemory
from mpiddp.gpu.runtime import runtime_of
from mpiddp.mpi import nodes
from mpiddp.system import caches, copying, cores, helpers
from mpiddp.transports import gpu_choice
from mpiddp.transports.gpu_ring import GpuRingTransport
from mpiddp.transports.gpu_staging import StagingTransport
from mpiddp.transports.lanes import LaneTransport
from mpiddp.transports.messages import MessageTransport
from mpiddp.transports.shared import SharedTransport
from mpiddp.transports.wire import Wire
from mpiddp.transports.wire_choice import IALLREDUCE, TWO_LEVEL, thresholds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from mpiddp.engine.engine import Channel, Engine


# Between nodes the wire is idle until a bucket is full, and what the last ones hold is sent when
# backward is over: 4 MiB instead of torch's 25 took a fifth off a step between two hosts. 1 MiB, as
# much as a chunk, hid 6 to 11 points more of the wire (64 x Linear(512), 1 Gbit/s); a
# step took up to 4 % longer where the cores limit (10 Gbit/s). Where each bucket costs a call in
# Python or ends a compiled graph, 4 MiB stay. Inside a node it makes no difference.
BUCKET_BYTES_BETWEEN_NODES = 1 << 20
BUCKET_BYTES_WITH_PYTHON = 4 << 20
BUCKET_BYTES_INSIDE_NODE = 25 << 20

# What MPI gets at once. Between two nodes, two chunks fill a wire of 1 Gbit/s in both directions.
# MPI_Iallreduce takes a tenth longer with 1 MiB than with 512 KiB, and half as long again with four
# of 1 MiB. The exchange takes as long with either at 1 Gbit/s, and with 1 MiB a tenth less core
# time, which bounds a step at 10 Gbit/s. Between four nodes, four of 1 MiB take a tenth less than
# two of 512 KiB: each chunk is sent in more and smaller messages, one after the other. More than
# four nodes could not be measured.
CHUNK_BYTES = 1 << 20
CHUNK_BYTES_OF_TWO_WITH_IALLREDUCE = 512 << 10
MOST_CHUNKS = 8


class HostTransport(Protocol):
    """What the engine needs of a transport for buckets in the host's memory."""

    @property
    def address(self) -> int:
        """Where the engine finds the C ``Transport``, see engine/interface.pxd."""

    def allocate(self, sizes: Sequence[int]) -> list[BucketMemory]:
        """Return memory for buckets of these sizes in bytes. Collective."""

    def free(self) -> None:
        """Free what was made of the communicator. Collective."""


def requested_transport(argument: str | None) -> str:
    """Return the transport that the argument names, else the environment. Not collective.

    Raises:
        ValueError: there is no transport of this name.
    """
    if argument is None:
        return settings.TRANSPORT.read()
    if argument not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, not {argument!r}")
    return argument


def open_channel(
    engine: Engine, communicator: MPI.Comm, name: str, device: torch.device | None = None
) -> Channel:
    """Return a channel of the engine over a transport of its own.

    Collective.

    Args:
        engine: the process's progress engine.
        communicator: used by nothing else from now on.
        name: one of `TRANSPORTS`, the same on all ranks.
        device: where the buckets will be; None for the CPU. `Engine.close_channel` closes what lies
            below it, too.

    Raises:
        OSError: "shared" was asked for, and the ranks of a node cannot share memory.
        GpuError: the device's runtime refuses to make streams.
        ValueError: MPIDDP_DEVICE_TRANSPORT names no transport.
        RuntimeError: it differs between ranks.
    """
    runtime = None if device is None else runtime_of(device)
    if device is None or runtime is None:
        return _open_host_channel(engine, communicator, name)
    choice = gpu_choice.choose(communicator, device)
    if choice.name != gpu_choice.STAGING:
        transport = gpu_choice.make_transport(choice.name, communicator, device)
        return engine.open_channel(transport, communicator)
    channel = _open_host_channel(engine, communicator, name)
    return engine.open_channel(StagingTransport(channel, runtime, device), communicator)


class WorldOfOneMemory:
    """Memory for the buckets of a world of one on a device: nothing travels.

    Args:
        device: where the buckets are.
    """

    # To the engine, 0 is no transport.
    address = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, sizes: Sequence[int], tails: Sequence[int] | None = None) -> list[GpuMemory]:
        """Return a `GpuMemory` for each of `sizes` in bytes. Not collective.

        Args:
            sizes: of the buckets, with their tails.
            tails: how much of each stays in host memory, in bytes; None: nothing.
        """
        return [
            GpuMemory(
                torch.zeros(size - tail, dtype=torch.uint8, device=self.device),
                tail=torch.zeros(tail, dtype=torch.uint8, device="cpu"),
            )
            for size, tail in zip(sizes, tails or [0] * len(sizes), strict=True)
        ]

    def free(self) -> None:
        """Do nothing."""


def open_channel_of_one(engine: Engine, device: torch.device | None = None) -> Channel:
    """Return a channel for a world of one, whose jobs are done when they are submitted.

    Not collective.

    Args:
        engine: the process's progress engine.
        device: where the buckets will be; None for the CPU.
    """
    if device is None or runtime_of(device) is None:
        _allow_helpers([(cores.available(), torch.get_num_threads())])
        return engine.open_channel(None)
    return engine.open_channel(WorldOfOneMemory(device))


def chunks_in_flight(nodes: int, way: str | None = None) -> tuple[int, int]:
    """Return how many chunks are sent at once, and their size in bytes.

    Not collective.

    Args:
        nodes: how many nodes the ranks are on.
        way: that all chunks take, if it is known.
    """
    if nodes <= 2:
        return 2, CHUNK_BYTES_OF_TWO_WITH_IALLREDUCE if way == IALLREDUCE else CHUNK_BYTES
    return min(2 * (nodes - 1).bit_length(), MOST_CHUNKS), CHUNK_BYTES


@dataclass(frozen=True)
class WirePlan:
    """How chunks travel between nodes: arguments of `Wire`."""

    chunk_bytes: int
    window: int
    ways: dict[int, list[tuple[int, str]]]
    group: int


def plan_wire(
    nodes: int, way: str | None = None, lanes: int = 1, called: str = "nodes"
) -> WirePlan:
    """Return how chunks travel between so many nodes. Not collective.

    Args:
        nodes: how many.
        way: that all chunks take; None: what MPIDDP_WIRE says.
        lanes: how many ranks of each node send at once.
        called: what errors call the nodes.

    Raises:
        ValueError: two levels were asked for, and the nodes make no groups of equal size.
    """
    way = way or settings.WIRE.read()
    window, chunk_bytes = chunks_in_flight(nodes, way)
    group = 1
    ways = {}
    for element_bytes in (2, 4, 8):
        table = thresholds(nodes, element_bytes, chunk_bytes, way, called)
        ways[element_bytes] = [(smallest, way.name) for smallest, way in table]
        group = max([group, *(way.group for _, way in table if way.name == TWO_LEVEL)])
    # Slices that are all equally long need no copy.
    chunk_bytes = max(chunk_bytes // (64 * nodes), 1) * 64 * nodes
    return WirePlan(chunk_bytes, max(-(-window // lanes), 2), ways, group)


def _make_iallreduce(communicator: MPI.Comm, node_count: int) -> MessageTransport:
    return _make_messages(communicator, plan_wire(node_count, IALLREDUCE))


def _make_exchange(communicator: MPI.Comm, node_count: int) -> MessageTransport:
    return _make_messages(
        communicator,
        plan_wire(communicator.Get_size(), called="ranks"),
    )


def _make_messages(communicator: MPI.Comm, plan: WirePlan) -> MessageTransport:
    return MessageTransport(Wire(communicator, **vars(plan)))


# The transports that treat all ranks of a communicator alike, by name, and the function that makes
# one from the communicator and the number of its nodes. A new transport gets its line here.
MAKERS: dict[str, Callable[[MPI.Comm, int], HostTransport]] = {
    "exchange": _make_exchange,
    "mpi": _make_iallreduce,
}

# What a user may ask for. "shared" is shared memory inside nodes and lanes between them; "auto"
# takes it where any ranks share a node, else "exchange".
TRANSPORTS: tuple[str, ...] = ("auto", "shared", *MAKERS)


def _open_host_channel(engine: Engine, communicator: MPI.Comm, name: str) -> Channel:
    node = nodes.ranks_of_node(communicator)
    # Bound ranks see their own cores only.
    core_count = _allow_helpers(node.allgather((cores.available(), torch.get_num_threads())))
    here = communicator.allgather((node.Get_rank(), node.Get_size()))
    ranks_here = [size for _, size in here]

    def send_only() -> Channel:
        make = MAKERS.get(name, _make_exchange)
        transport = make(communicator, sum(rank == 0 for rank, _ in here))
        return engine.open_channel(transport, communicator)

    if name in MAKERS or (name == "auto" and max(ranks_here) == 1):
        node.Free()
        return send_only()
    problem = ""
    transport: SharedTransport | LaneTransport | None = None
    try:
        if min(ranks_here) == communicator.Get_size():
            transport = _make_shared(node, core_count)
        else:
            node_count = sum(rank == 0 for rank, _ in here)
            plan = plan_wire(node_count, lanes=min(ranks_here))
            transport = LaneTransport(communicator, node, **vars(plan))
    except OSError as error:
        problem = str(error)
    problems = [text for text in communicator.allgather(problem) if text]
    if not problems:
        return engine.open_channel(transport, communicator)
    # The communicators made so far stay: freeing them is collective, and some ranks have fewer.
    if name == "shared":
        raise OSError(problems[0])
    if communicator.Get_rank() == 0:
        warnings.warn(
            f"the ranks of a node cannot share memory, so gradients go through MPI, which is "
            f"slower: {problems[0]}",
            stacklevel=2,
        )
    return send_only()


def sends_messages(channel: Channel) -> bool:
    """Whether gradients in this channel leave the memory that the ranks share. Not collective."""
    transport = channel.transport
    if isinstance(transport, StagingTransport):
        transport = transport.inner.transport
    return isinstance(transport, MessageTransport | LaneTransport | GpuRingTransport)


def default_bucket_bytes(channel: Channel, *, with_python: bool = False) -> list[int]:
    """Return the size of the first bucket, and of all others, where none is given.

    Not collective. A first bucket of 1 MiB is followed by torch's 25 MiB where the ranks share
    memory, by others of 1 MiB where messages are sent.

    Args:
        channel: in which the gradients travel.
        with_python: each bucket costs work in Python; where messages are sent, 4 MiB.
    """
    cap = BUCKET_BYTES_INSIDE_NODE
    if sends_messages(channel):
        cap = BUCKET_BYTES_WITH_PYTHON if with_python else BUCKET_BYTES_BETWEEN_NODES
    return [dist._DEFAULT_FIRST_BUCKET_BYTES, cap]  # type: ignore[attr-defined]  # as torch does


def shares_memory(channel: Channel) -> bool:
    """Whether buckets of this channel lie in memory that the ranks share. Not collective."""
    transport = channel.transport
    if isinstance(transport, StagingTransport):
        transport = transport.inner.transport
    return isinstance(transport, SharedTransport | LaneTransport)


def _allow_helpers(ranks: Sequence[tuple[set[int], int]]) -> int:
    """Let helpers copy and sum if the node has a core for each thread of its ranks.

    Returns how many cores those are. Not collective.

    Args:
        ranks: the cores that each rank of the node may use, and how many threads torch has there.
    """
    core_count = len(set[int]().union(*(own for own, _ in ranks)))
    threads = torch.get_num_threads()
    spare = sum(number for _, number in ranks) <= core_count
    helpers.allow(helpers.useful(threads - 1) if spare else 0)
    copying.keep_in_cache(caches.share_of_cache(threads))
    return core_count


def _make_shared(node: MPI.Comm, core_count: int) -> SharedTransport:
    spare = cores.are_spare(core_count, node.Get_size(), torch.get_num_threads())
    return SharedTransport(
        node,
        crowded=nodes.is_crowded(node),
        wants_thread=spare or settings.PROGRESS_THREAD.read() is True,
    )

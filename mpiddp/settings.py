"""Every environment variable of mpiddp: its name, its values, and how to read it.

A leaf: it imports nothing of mpiddp. No other file reads a variable whose name begins with
MPIDDP_.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

__all__ = [
    "BUCKET_CAP_MB",
    "COLLECTIVES",
    "DEBUG",
    "DEVICE_TRANSPORT",
    "DUMP_SIGNAL",
    "HEARTBEAT_SECONDS",
    "INTERFACE",
    "JOIN",
    "KERNELS",
    "PREEMPTION_SIGNALS",
    "PROGRAMS",
    "PROGRESS_THREAD",
    "SETTINGS",
    "SHARED_PARAMETERS",
    "SLOW_RANKS",
    "STALL_SECONDS",
    "START_SECONDS",
    "TRACE",
    "TRACE_STEPS",
    "TRANSPORT",
    "TRIAL_SECONDS",
    "WIRE",
    "Setting",
]

Value = TypeVar("Value")


@dataclass(frozen=True)
class Setting(Generic[Value]):
    """One environment variable.

    Attributes:
        name: of the variable.
        type: what it may be, in words such as "0 or 1".
        default: what holds if it is unset.
        meaning: what it is for, in a sentence or two.
        same_on_all_ranks: whether it must be. Then init_process_group compares it.
        parse: returns what a text stands for; raises ValueError for one that is not allowed.
        unset: what `read` returns where the variable is unset.
    """

    name: str
    type: str
    default: str
    meaning: str
    same_on_all_ranks: bool
    parse: Callable[[str], Value] = field(repr=False)
    unset: Value

    def read(self) -> Value:
        """Return what the environment says. Not collective.

        Raises:
            ValueError: it says something that is not allowed.
        """
        text = self.text()
        if text is None:
            return self.unset
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(f"{self.name} must be {self.type}, not {text!r}") from None

    def read_before_init(self) -> Value:
        """Return what `read` does, but what holds if it is unset instead of an error.

        Not collective. For what happens before init_process_group, which raises the error on all
        ranks together.
        """
        try:
            return self.read()
        except ValueError:
            return self.unset

    def describe(self) -> str:
        """Return the value in words, for comparing and for errors. Not collective."""
        default = "unset" if self.unset is None else self.default
        text = self.text()
        return default if text is None else text

    def text(self) -> str | None:
        """Return the variable as it is, None where it is unset. Not collective."""
        return os.environ.get(self.name)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return parse


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


def _domains(text: str) -> str:
    """Return which ranks share, "" for none."""
    if text in ("1", "node", "socket", "numa") or (text.isdecimal() and int(text) != 1):
        return text if text.strip("0") else ""
    raise ValueError


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _positive(text: str) -> int:
    number = _count(text)
    if not number:
        raise ValueError
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError
    return seconds


def _seconds_or_none(text: str) -> float:
    """Return seconds, infinitely many for "none"."""
    return float("inf") if text == "none" else _seconds(text)


def _megabytes(text: str) -> float | str:
    """Return a number of MiB, or "auto"."""
    if text == "auto":
        return text
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError
    return number


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise ValueError
    return words


def _signals(text: str) -> tuple[int, ...]:
    """Return the numbers of signals with commas between them."""
    numbers = (_signal(name.strip()) for name in text.split(","))
    return tuple(number for number in numbers if number)


def _signal(text: str) -> int:
    """Return the number of a signal, 0 for none."""
    name = text.upper().removeprefix("SIG")
    if name == "NONE":
        return 0
    if name.startswith("RTMIN+"):
        number = signal.SIGRTMIN + int(name.removeprefix("RTMIN+"))
    else:
        number = int(name) if name.isdecimal() else getattr(signal, f"SIG{name}", 0)
    if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError
    return number


TRANSPORT = Setting(
    "MPIDDP_TRANSPORT",
    "auto, shared, exchange or mpi",
    "auto",
    "How gradients travel where DistributedDataParallel is not told by `transport`: in memory "
    "that the ranks of a node share, by an exchange among all ranks, or by MPI_Iallreduce. auto "
    "takes what is faster.",
    True,
    _one_of("auto", "shared", "exchange", "mpi"),
    "auto",
)
DEVICE_TRANSPORT: Setting[str] = Setting(
    "MPIDDP_DEVICE_TRANSPORT",
    "auto, staging, device or ring",
    "auto",
    "How gradients on a GPU travel: through pinned host memory (staging), by MPI_Iallreduce of the "
    "GPU's memory (device), or around a ring of messages with the sums on the GPU (ring). auto "
    "takes the first of device, ring and staging that this MPI is known and seen to do right.",
    True,
    _one_of("auto", "staging", "device", "ring"),
    "auto",
)
WIRE = Setting(
    "MPIDDP_WIRE",
    "auto, direct, two-level or iallreduce",
    "auto",
    "How gradients on the CPU travel between nodes: each node adds one slice of all (direct), that "
    "in groups of nodes and then across them (two-level), or MPI_Iallreduce does it. auto takes "
    "what should cost least for the number of nodes and the size of a chunk. two-level needs a "
    "number of nodes that can be divided into equal groups, so 4 or more and no prime.",
    True,
    _one_of("auto", "direct", "two-level", "iallreduce"),
    "auto",
)
COLLECTIVES = Setting(
    "MPIDDP_COLLECTIVES",
    "memory, copies or messages",
    "memory",
    "How the operations of a process group travel: in memory of its ranks of a node, where that is "
    "faster; the same, but through copies in shared memory only, so that no rank reads another "
    "one's tensors where they are; or all by MPI's calls and messages.",
    True,
    _one_of("memory", "copies", "messages"),
    "memory",
)
PROGRESS_THREAD: Setting[bool | None] = Setting(
    "MPIDDP_PROGRESS_THREAD",
    "0 or 1",
    "a thread where messages need it or cores are left over",
    "Whether a thread makes progress while backward runs: 0 never starts it, and then "
    "MPI_THREAD_SERIALIZED is enough, and ranks look and answer others only while they wait; 1 "
    "always does.",
    True,
    _flag,
    None,
)
KERNELS: Setting[str | None] = Setting(
    "MPIDDP_KERNELS",
    "one of the names that mpiddp.system.kernels.available() returns, such as plain or avx2",
    "the best that the processor can run",
    "Which SIMD instructions add gradients in shared memory. All give the same bits.",
    False,
    # The choice depends on the processor, so mpiddp.system.kernels checks it.
    lambda text: text or None,
    None,
)
DEBUG = Setting(
    "MPIDDP_DEBUG",
    "a number of steps, or 0",
    "0",
    "After how many backward passes all ranks compare the bits of their parameters, again and "
    "again: 1 is after each, 0 never. It costs reading all parameters.",
    True,
    _count,
    0,
)
SHARED_PARAMETERS = Setting(
    "MPIDDP_SHARED_PARAMETERS",
    "0, 1, node, socket, numa or a number of ranks",
    "0",
    "Which ranks of a node share the parameters of each wrapped module, as "
    "`DistributedDataParallel(..., shared_parameters=...)` does, and every optimizer of torch "
    "steps them once for all of these. 1 is what suits the machine, mostly the node's. What cannot "
    "be shared is told, and trained as without it.",
    True,
    _domains,
    "",
)
BUCKET_CAP_MB: Setting[float | str | None] = Setting(
    "MPIDDP_BUCKET_CAP_MB",
    "a number of MiB, not negative, or auto",
    "25 inside a node, 1 between nodes",
    "The size of gradient buckets where DistributedDataParallel is told neither by `bucket_cap_mb` "
    "nor by `bucket_cap_mb_list`. auto measures several sizes in the first steps of training, and "
    "takes the best.",
    True,
    _megabytes,
    None,
)
DUMP_SIGNAL: Setting[int] = Setting(
    "MPIDDP_DUMP_SIGNAL",
    "a signal such as USR2, RTMIN+6 or 40, or none",
    "RTMIN+6",
    "The signal at which a rank writes what it did last to a file, even while it waits for other "
    "ranks. A signal that the program handles itself is left alone.",
    False,
    _signal,
    signal.SIGRTMIN + 6,
)
PREEMPTION_SIGNALS: Setting[tuple[int, ...]] = Setting(
    "MPIDDP_PREEMPTION_SIGNALS",
    "names of signals with commas between them, such as USR2,TERM, or none",
    "USR1,USR2,TERM",
    "The signals that announce the end of the job to a program that calls "
    "`mpiddp.preemption.install()`.",
    False,
    _signals,
    (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM),
)
STALL_SECONDS: Setting[float] = Setting(
    "MPIDDP_STALL_SECONDS",
    "a positive number, or none",
    "30",
    "After how many seconds of waiting one rank says on stderr what is waited for, which ranks "
    "have not come, and what they do instead; and again each time that the wait has doubled.",
    False,
    _seconds_or_none,
    30.0,
)
SLOW_RANKS = Setting(
    "MPIDDP_SLOW_RANKS",
    "0 or 1",
    "1",
    "Whether the ranks of a wrapped module compare their times every 25 steps, so that a rank that "
    "the others have waited for in most of the last 100 says so on stderr, and "
    "`mpiddp.metrics` can tell it.",
    True,
    _flag,
    True,
)
START_SECONDS: Setting[float] = Setting(
    "MPIDDP_START_SECONDS",
    "a positive number, or none",
    "1800",
    "How many seconds a process waits in MPI_Init for the others before it ends itself, where "
    "mpiddp initialises MPI. After that `timeout` of init_process_group holds.",
    False,
    _seconds_or_none,
    1800.0,
)
PROGRAMS: Setting[str | None] = Setting(
    "MPIDDP_PROGRAMS",
    "own or all",
    "an error that asks",
    "Which ranks train together in a job of several programs (mpirun -n 2 A : -n 2 B) where no "
    "communicator is passed: those of this program, or all.",
    False,
    _one_of("own", "all"),
    None,
)
HEARTBEAT_SECONDS: Setting[float] = Setting(
    "MPIDDP_HEARTBEAT_SECONDS",
    "a positive number, or none",
    "60",
    "For how many seconds another node may be silent, off or cut off, before a rank that waits for "
    "it ends the job. none: nodes do not watch each other.",
    True,
    _seconds_or_none,
    60.0,
)
INTERFACE: Setting[tuple[str, ...] | None] = Setting(
    "MPIDDP_INTERFACE",
    "names of interfaces, addresses or networks such as 10.1.0.0/16, with commas between them",
    "what MPI was told to use, else a network that all nodes are in",
    "At which address of a node the sockets of mpiddp listen between nodes, and that of "
    "`mpiddp.elastic.admit`. It has no effect on what MPI uses.",
    False,
    _words,
    None,
)
JOIN: Setting[Path | None] = Setting(
    "MPIDDP_JOIN",
    "the name of a folder",
    "unset",
    "The folder of `mpiddp.elastic.admit` of a job that runs: the ranks of this job come to that "
    "one, instead of having a world of their own. Not with Open MPI.",
    False,
    # An empty one is as good as none.
    lambda text: Path(text) if text else None,
    None,
)
TRIAL_SECONDS = Setting(
    "MPIDDP_TRIAL_SECONDS",
    "a positive number",
    "90",
    "After how many seconds a rank of the job that tries GPU memory in MPI ends itself. mpiddp "
    "sets it for that job.",
    False,
    _seconds,
    90.0,
)
TRACE: Setting[Path | None] = Setting(
    "MPIDDP_TRACE",
    "the name of a folder",
    "unset",
    "Where to write a trace of the first steps to: when each rank did what, for Perfetto.",
    True,
    lambda text: Path(text) if text else None,
    None,
)
TRACE_STEPS = Setting(
    "MPIDDP_TRACE_STEPS",
    "a positive number",
    "100",
    "After how many backward passes of a module a trace of MPIDDP_TRACE ends.",
    True,
    _positive,
    100,
)

SETTINGS: tuple[Setting[Any], ...] = (
    TRANSPORT,
    DEVICE_TRANSPORT,
    WIRE,
    COLLECTIVES,
    PROGRESS_THREAD,
    KERNELS,
    DEBUG,
    SHARED_PARAMETERS,
    BUCKET_CAP_MB,
    DUMP_SIGNAL,
    PREEMPTION_SIGNALS,
    STALL_SECONDS,
    SLOW_RANKS,
    START_SECONDS,
    PROGRAMS,
    HEARTBEAT_SECONDS,
    INTERFACE,
    JOIN,
    TRIAL_SECONDS,
    TRACE,
    TRACE_STEPS,
)

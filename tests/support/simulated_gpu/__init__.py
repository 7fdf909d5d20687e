"""A GPU without one: compile simulated_gpu.c, load it, and let CPU tensors live on it.

With `on_cpu_tensors`, CPU tensors take the full path of tensors on a GPU. torch's own
work on them is done when torch returns, so their default stream is the calling thread: waiting
there for an event blocks. Streams made with `mpiddp.gpu.runtime.Stream` run beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import os
import shlex
import subprocess
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpiddp.gpu.runtime import Runtime, Stream, register

SOURCES = [Path(__file__).with_name(name) for name in ("simulated_gpu.c", "simulated_blas.c")]
BUILT = Path(__file__).parents[3] / "build"


@cache
def library() -> str:
    """Return the path of the library, compiled if it is not yet."""
    compiler = [*shlex.split(os.environ.get("CC", "cc")), "-O1", "-g", "-Wall", "-Werror"]
    text = b"".join(path.read_bytes() for path in SOURCES) + " ".join(compiler).encode()
    path = BUILT / f"simulated-gpu-{hashlib.sha256(text).hexdigest()[:12]}.so"
    if not path.exists():
        # All ranks may come here at once, and each must find a whole file.
        BUILT.mkdir(exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        command = [*compiler, "-shared", "-fPIC", "-pthread", "-o", str(unfinished)]
        subprocess.run([*command, *map(str, SOURCES)], check=True)
        unfinished.rename(path)
    return str(path)


class Counts(ctypes.Structure):
    """What is alive, and what has been done since the library was loaded."""

    streams: int
    events: int
    registrations: int
    allocations: int
    copies_to_host: int
    copies_to_device: int
    unpinned_copies: int
    landed_on_host: int
    queries: int
    contexts: int

    _fields_ = [
        (name, ctypes.c_long)
        for name in (
            "streams",
            "events",
            "registrations",
            "allocations",
            "copies_to_host",
            "copies_to_device",
            "unpinned_copies",
            "landed_on_host",
            "queries",
            "contexts",
        )
    ]

    @property
    def alive(self) -> tuple[int, int, int, int]:
        """Streams, events, registrations and allocations that were not given back."""
        return self.streams, self.events, self.registrations, self.allocations


class SimulatedRuntime(Runtime):
    """The simulated GPU, with what a test may set and see.

    Attributes:
        device_index: of every tensor's device; torch has only one CPU.
    """

    def __init__(self) -> None:
        super().__init__(library(), "cuda")
        self.device_index = 0
        self._before = Counts()
        self._streams = threading.local()
        self._c = ctypes.CDLL(library())
        seconds, pointer = ctypes.c_double, ctypes.c_void_p
        self._c.simulatedSetDelays.argtypes = [seconds, seconds]
        self._c.simulatedSetSumDelay.argtypes = [seconds]
        self._c.simulatedFail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long]
        self._c.simulatedSleep.argtypes = [pointer, seconds]
        self._c.simulatedHold.argtypes = [pointer]
        self._c.simulatedRelease.argtypes = [ctypes.c_long]
        for kernel in (self._c.simulatedCopy, self._c.simulatedAdd):
            kernel.argtypes = [pointer, seconds, pointer, pointer, ctypes.c_size_t]

    def current_stream(self, device: torch.device) -> int:
        """Return what `use_stream` has set in this thread, else 0, the thread's own."""
        return getattr(self._streams, "current", 0)

    @contextlib.contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one of this thread for a while."""
        before = self.current_stream(torch.device("cpu"))
        self._streams.current = stream.address
        yield
        self._streams.current = before

    def index_of(self, device: torch.device) -> int:
        """Return the one index that is set here."""
        return self.device_index

    @property
    def counts(self) -> Counts:
        """What is alive, except what `overlook` has seen, and what was done."""
        counts = Counts()
        self._c.simulatedCounts(ctypes.byref(counts))
        for name in ("streams", "events", "registrations", "allocations"):
            setattr(counts, name, getattr(counts, name) - getattr(self._before, name))
        return counts

    def overlook(self) -> None:
        """Leave what other tests keep alive, such as the world's channels, out of all counts."""
        self._before = Counts()
        if any(self.counts.alive):
            gc.collect()
            self._c.simulatedCounts(ctypes.byref(self._before))

    @property
    def busy(self) -> bool:
        """Whether some stream has something to do."""
        return bool(self._c.simulatedBusy())

    @property
    def last_error(self) -> int:
        """The last error of this thread; reading clears it."""
        return int(self._c.cudaGetLastError())

    def set_devices(self, number: int) -> None:
        """Say how many devices there are."""
        self._c.simulatedSetDevices(number)

    def use_device(self, device: int) -> None:
        """Make a device the current one of this thread, and forget where contexts were made."""
        assert self._c.cudaSetDevice(device) == 0
        self._c.simulatedForgetContexts()

    def set_delays(self, to_host: float = 0.0, to_device: float = 0.0) -> None:
        """Let each copy take this many seconds longer."""
        self._c.simulatedSetDelays(to_host, to_device)

    def set_sum_delay(self, seconds: float = 0.0) -> None:
        """Let each sum of the BLAS library take this many seconds longer."""
        self._c.simulatedSetSumDelay(seconds)

    @contextlib.contextmanager
    def failing(self, call: str, code: int = 999, after: int = 0) -> Iterator[None]:
        """Let a function, named without its prefix, fail from its call number `after` on."""
        self._c.simulatedFail(call.encode(), code, after)
        try:
            yield
        finally:
            self._c.simulatedFail(call.encode(), 0, 0)

    def hold_copies(self, to_host: bool = False, to_device: bool = False) -> None:
        """Hold up copies that are issued from now on, each until it is released."""
        self._c.simulatedHoldCopies(to_host, to_device)

    def hold(self, stream: int) -> None:
        """Run a kernel that ends when it is released."""
        assert self._c.simulatedHold(stream) == 0

    def release(self, number: int = -1) -> None:
        """Release the oldest `number` of what is held up; without a number, all."""
        self._c.simulatedRelease(number)

    def sleep(self, stream: int, seconds: float) -> None:
        """Run a kernel that does nothing for some time."""
        assert self._c.simulatedSleep(stream, seconds) == 0

    def copy(
        self, stream: int, to: torch.Tensor, source: torch.Tensor, seconds: float = 0.0
    ) -> None:
        """Run a kernel that copies a tensor after some time; both must stay alive till then."""
        self._kernel(self._c.simulatedCopy, stream, to, source, seconds)

    def add(
        self, stream: int, to: torch.Tensor, source: torch.Tensor, seconds: float = 0.0
    ) -> None:
        """Run a kernel that adds float32 `source` to `to` after some time."""
        assert to.dtype == source.dtype == torch.float32
        self._kernel(self._c.simulatedAdd, stream, to, source, seconds)

    @staticmethod
    def _kernel(
        kernel: ctypes._NamedFuncPointer,
        stream: int,
        to: torch.Tensor,
        source: torch.Tensor,
        seconds: float,
    ) -> None:
        assert to.is_contiguous()
        assert source.is_contiguous()
        assert to.nbytes == source.nbytes
        assert kernel(stream, seconds, to.data_ptr(), source.data_ptr(), to.nbytes) == 0


class InOrderOfStream(TorchDispatchMode):
    """Run each of torch's operations when the current stream reaches it, as on a GPU.

    Args:
        streams: those that may be the current one.
    """

    def __init__(self, *streams: Stream) -> None:
        super().__init__()
        self.streams = {stream.address: stream for stream in streams}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        current = runtime().current_stream(torch.device("cpu"))
        if current in self.streams:
            self.streams[current].synchronize()
        return func(*args, **(kwargs or {}))


@cache
def runtime() -> SimulatedRuntime:
    """Return the simulated runtime of this process."""
    return SimulatedRuntime()


@contextlib.contextmanager
def on_cpu_tensors() -> Iterator[SimulatedRuntime]:
    """Treat CPU tensors as tensors on the simulated GPU for a while."""
    simulated = runtime()
    before = register("cpu", simulated)
    try:
        yield simulated
    finally:
        register("cpu", before)
        simulated.hold_copies()
        simulated.release()
        simulated.set_delays()
        simulated.set_sum_delay()
        simulated.use_device(0)
        simulated.set_devices(1)
        simulated.device_index = 0

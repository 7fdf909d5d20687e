"""Copies between one GPU and pinned host memory, on streams; their memory is kept until they end.

Knows nothing of process groups and MPI. Nothing here is collective.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from mpiddp.collectives.packing import dense
from mpiddp.gpu.runtime import COPY_TO_GPU, COPY_TO_HOST, Event, Runtime, Stream, runtime_of

__all__ = ["Copier", "copier_of"]

# Of tensors that share a piece of host memory; more than any element needs.
_ALIGNMENT = 64

Pair = tuple[torch.Tensor, torch.Tensor]


class Copier:
    """The copies of one GPU.

    Args:
        device: the GPU.
        runtime: its runtime.

    Attributes:
        back: the handle of a stream for copies that run beside torch's work.
    """

    def __init__(self, device: torch.device, runtime: Runtime) -> None:
        self.device, self.runtime = device, runtime
        self._index = runtime.index_of(device)
        self._stream = Stream(runtime, self._index)
        self.back = self._stream.address
        # What copies read and write, until their event has passed.
        self._kept: list[tuple[Event, object]] = []
        self._lock = threading.Lock()

    def using(self) -> AbstractContextManager[object]:
        """Within, make the GPU this thread's current one.

        A stream handle of 0 means the current GPU's; and a thread that has chosen no GPU would
        make a context on the first.
        """
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()

    def on_back(self) -> AbstractContextManager[object]:
        """Within, order torch's work in this thread after the copies on `back`."""
        if self.device.type == "cuda":
            return self._torch_on(self.back)
        # torch does not know this stream: its work is over when it returns.
        self._stream.synchronize()
        return contextlib.nullcontext()

    def current_stream(self) -> int:
        """Return the handle of this thread's current stream."""
        return self.runtime.current_stream(self.device)

    def host_memory_like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return contiguous tensors on the host of the same shapes and dtypes, not initialised.

        All lie in one piece of pinned memory, which torch's allocator reuses, but each has its own
        version counter.
        """
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        rooms = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        pinned = self.device.type == "cuda"
        memory = torch.empty(sum(rooms), dtype=torch.uint8, pin_memory=pinned, device="cpu")
        return [
            part[:size].view(tensor.dtype).view(tensor.shape).data
            for part, size, tensor in zip(torch.split(memory, rooms), sizes, tensors, strict=True)
        ]

    def to_host(self, pairs: Iterable[Pair], stream: int) -> Event:
        """Copy the first tensor of each pair to the second, on the host; return an event for it.

        All are kept until it passes.

        Raises:
            GpuError: the runtime refuses.
            TypeError: a tensor's layout is not strided.
        """
        sources = [(dense(tensor, anywhere=True), host) for tensor, host in pairs]
        for source, host in sources:
            self._copy(host, source, COPY_TO_HOST, stream)
        return self._kept_until_over(stream, sources)

    def to_device(self, pairs: Sequence[Pair], stream: int, owner: object = None) -> Event:
        """Copy the second tensor of each pair, on the host, to the first; return an event for it.

        The host's tensors and `owner` are kept until it passes. The caller must keep the others
        if `stream` is not theirs.

        Raises:
            GpuError: the runtime refuses.
        """
        for tensor, host in pairs:
            if dense(tensor, anywhere=True) is tensor:
                self._copy(tensor, host, COPY_TO_GPU, stream)
            else:
                with self._torch_on(stream), torch.no_grad():
                    tensor.copy_(host, non_blocking=True)
        return self._kept_until_over(stream, ([host for _, host in pairs], owner))

    def mark(self, stream: int) -> Event:
        """Return an event that passes when the stream has done what is on it now."""
        event = Event(self.runtime, self._index)
        event.record(stream)
        return event

    def _copy(self, to: torch.Tensor, source: torch.Tensor, kind: int, stream: int) -> None:
        size = source.numel() * source.element_size()
        if size:
            self.runtime.copy_async(to.data_ptr(), source.data_ptr(), size, kind, stream)

    def _torch_on(self, stream: int) -> AbstractContextManager[object]:
        """Let torch work on `back`, or on the current stream."""
        if self.device.type == "cuda" and stream == self.back:
            external: Any = torch.cuda.ExternalStream  # has no types
            return torch.cuda.stream(external(stream, self.device))
        return contextlib.nullcontext()

    def let_go(self) -> None:
        """Release what finished copies have read and written."""
        with self._lock:
            self._kept = [kept for kept in self._kept if not kept[0].query()]

    def _kept_until_over(self, stream: int, memory: object) -> Event:
        self.let_go()
        event = self.mark(stream)
        with self._lock:
            self._kept.append((event, memory))
        return event


_copiers: dict[torch.device, Copier] = {}
_lock = threading.Lock()


def copier_of(device: torch.device) -> Copier:
    """Return the one copier of a GPU.

    Raises:
        ValueError: tensors there cannot be moved.
    """
    runtime = runtime_of(device)
    if runtime is None:
        raise ValueError(
            f"mpiddp moves tensors on the CPU and on GPUs of CUDA and ROCm, not on {device}"
        )
    with _lock:
        copier = _copiers.get(device)
        if copier is None or copier.runtime is not runtime:
            copier = _copiers[device] = Copier(device, runtime)
        return copier

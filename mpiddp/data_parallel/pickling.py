"""Take objects apart for a message: one pickle, and the tensors beside it."""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpiddp.data_parallel.by_value import Reducer, reduce_received

__all__ = ["Meta", "Packed", "dense", "pack", "pack_module", "restore", "unpack"]

# Tensors up to so many bytes travel with the pickle.
_SMALL = 4096

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Meta:
    """What the receiver must know of a tensor: its memory is dense after `order` is applied.

    Attributes:
        shape: of the permuted tensor.
        dtype: its element type.
        order: the permutation of its dimensions that was sent.
        device: type of the device that it was on.
        content: its bytes if they are few, else None: a message of their own follows.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    device: str
    content: bytes | None


@dataclass
class Packed:
    """An object as a pickle and its tensors, which stay connected to their graphs."""

    body: bytes
    tensors: list[torch.Tensor]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor], kinds: tuple[type, ...],
                 by_value: bool) -> None:  # fmt: skip
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors
        self._kinds = kinds
        self._index: dict[int, int] = {}
        self._reducer: Reducer | None = None
        if by_value:
            self._reducer = Reducer(lambda file: _Pickler(file, [], kinds, by_value))

    def persistent_id(self, obj: Any) -> int | None:
        """Return the tensor's place in the list; None for what is pickled."""
        if type(obj) not in self._kinds or not _is_plain(obj):
            return None
        index = self._index.get(id(obj))
        if index is None:
            index = self._index[id(obj)] = len(self._tensors)
            self._tensors.append(obj)
        return index

    def reducer_override(self, obj: Any) -> Any:
        """Send classes and functions of the script by value."""
        back = reduce_received(obj)
        if back is not NotImplemented or self._reducer is None:
            return back
        return self._reducer.reduce(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: bytes, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(body))
        self._tensors = tensors

    def persistent_load(self, index: int) -> torch.Tensor:
        return self._tensors[index]


def pack(obj: object, by_value: bool = False) -> Packed:
    """Take an object apart. Not collective.

    Args:
        obj: what can be pickled, with tensors anywhere in it.
        by_value: send what the script defines by value, see Note [Classes of the script].
    """
    file, tensors = io.BytesIO(), list[torch.Tensor]()
    _Pickler(file, tensors, (torch.Tensor, torch.nn.Parameter), by_value).dump(obj)
    return Packed(file.getvalue(), tensors)


def pack_module(module: torch.nn.Module, by_value: bool) -> Packed:
    """Take a module apart, without those of its hooks that cannot be pickled. Not collective."""
    file, tensors = io.BytesIO(), list[torch.Tensor]()
    with _without_unsendable_hooks(module, by_value):
        # Parameters are pickled as such, around their tensors.
        _Pickler(file, tensors, (torch.Tensor,), by_value).dump(module)
    return Packed(file.getvalue(), tensors)


def unpack(body: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Put an object together again. Not collective."""
    return _Unpickler(body, tensors).load()


def dense(tensor: torch.Tensor) -> tuple[Meta, torch.Tensor | None]:
    """Return a tensor's description, and what is sent of it: on the CPU, contiguous.

    Not collective. None is sent of a small one.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    strides = plain.stride()
    order = tuple(sorted(range(plain.dim()), key=lambda d: -strides[d]))
    if not plain.permute(order).is_contiguous():
        order = tuple(range(plain.dim()))
    sent = plain.permute(order).contiguous().cpu()
    content = None
    if sent.nbytes <= _SMALL:
        # The clone: one element that was expanded keeps a stride of 0.
        flat = sent.reshape(-1).clone(memory_format=torch.contiguous_format)
        content = flat.view(torch.uint8).numpy().tobytes()
    meta = Meta(tuple(sent.shape), sent.dtype, order, tensor.device.type, content)
    return meta, sent if content is None else None


def restore(meta: Meta) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an empty tensor for what `dense` has described, and its memory as it is sent."""
    memory = torch.empty(meta.shape, dtype=meta.dtype, device="cpu")
    if meta.content:
        flat = memory.view(-1).view(torch.uint8)
        flat.copy_(torch.frombuffer(bytearray(meta.content), dtype=torch.uint8))
    inverse = sorted(range(len(meta.order)), key=meta.order.__getitem__)
    return memory.permute(inverse), memory


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_nested
    )


@contextlib.contextmanager
def _without_unsendable_hooks(module: torch.nn.Module, by_value: bool) -> Any:
    """Within, the modules have only hooks that can be sent; warn of the others."""
    taken: list[tuple[torch.nn.Module, str, OrderedDict[int, Any]]] = []
    lost: list[str] = []
    for name, inner in module.named_modules():
        for kind in _HOOKS:
            hooks = vars(inner).get(kind)
            if not hooks:
                continue
            kept = OrderedDict(
                (key, hook) for key, hook in hooks.items() if _can_pack(hook, by_value)
            )
            if len(kept) < len(hooks):
                taken.append((inner, kind, hooks))
                lost.append(name or type(inner).__name__)
                vars(inner)[kind] = kept
    try:
        yield
    finally:
        for inner, kind, hooks in taken:
            vars(inner)[kind] = hooks
    if lost:
        warnings.warn(
            f"DataParallel: hooks of {', '.join(sorted(set(lost)))} cannot be pickled; they run on "
            f"rank 0 only, for its part of the batch",
            stacklevel=2,
        )


def _can_pack(obj: object, by_value: bool) -> bool:
    try:
        pack(obj, by_value)
    except Exception:
        return False
    return True

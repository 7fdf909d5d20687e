"""A module's parameters, buffers and settings: what rank 0 must send, and how it is put in place.

Note [What a replica is kept equal in]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
At each forward pass the replicas have rank 0's parameters and buffers, as torch's have. Rank 0
keeps the bytes that it has sent last in one flat buffer, and compares: versions of tensors would
not show what is written through ``.data``. Tensors that have changed and lie side by side travel in
one broadcast. The comparison ends at the first byte that differs, so it costs little in training.

Plain attributes (``training``, a dropout's ``p``, numbers, strings, tuples of them) are compared as
well. If submodules, hooks or the shapes of tensors have changed, the whole module is sent. What
else a module refers to (lists, other objects) is what it was when the module was sent.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

__all__ = ["Change", "Known", "Replica"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_ALIGNED = 64
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Slot:
    """Where one parameter or buffer lies in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    nbytes: int

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor's part of a flat buffer of bytes."""
        part = flat[self.begin : self.begin + self.nbytes]
        return part.view(self.dtype).view(self.shape)


@dataclass
class Change:
    """What the others must hear before a forward pass; a broadcast of each of `runs` follows.

    Attributes:
        slots: all tensors, if they are not known yet.
        flags: whether each tensor requires a gradient.
        attributes: new plain attributes by the number of the submodule.
        runs: from which to which byte the flat buffer has changed.
        changed: numbers of the tensors that have.
    """

    slots: list[Slot] | None
    flags: list[bool]
    attributes: dict[int, dict[str, Any]] = field(default_factory=dict)
    runs: list[tuple[int, int]] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)


class Known:
    """Rank 0's record of what the other ranks have of a module. Not collective."""

    def __init__(self) -> None:
        # Whether the whole module must be sent, for those that have not made it themselves.
        self.structure: list[Any] | None = None
        self.flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._slots: list[Slot] = []
        self._flags: list[bool] = []
        self._attributes: list[dict[str, Any]] = []

    def compare(self, module: torch.nn.Module) -> tuple[Change | None, bool]:
        """Return what has changed, None if nothing has, and whether the structure has.

        Raises:
            RuntimeError: a parameter is not initialised yet.
        """
        tensors = list(_tensors(module))
        structure = _structure(module, tensors)
        new = structure != self.structure
        if new:
            self.structure = structure
            self._slots = _layout(tensors)
            end = self._slots[-1].begin + self._slots[-1].nbytes if self._slots else 0
            self.flat = torch.zeros(end, dtype=torch.uint8, device="cpu")
            self._attributes = []
        change = Change(
            self._slots if new else None, [tensor.requires_grad for _, tensor in tensors]
        )
        for number, (slot, (_, tensor)) in enumerate(zip(self._slots, tensors, strict=True)):
            if self._take(slot, tensor) or new:
                change.changed.append(number)
                _extend(change.runs, slot)
        attributes = [_plain_attributes(inner) for inner in module.modules()]
        for number, now in enumerate(attributes):
            before = self._attributes[number] if self._attributes else {}
            if now != before:
                change.attributes[number] = {
                    name: value
                    for name, value in now.items()
                    if name not in before or before[name] != value
                }
        same = not new and change.flags == self._flags and not change.attributes
        self._attributes, self._flags = attributes, change.flags
        return (None if same and not change.changed else change), new

    def _take(self, slot: Slot, tensor: torch.Tensor) -> bool:
        """Copy a tensor into the flat buffer; return whether that changes it."""
        now = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
        target = slot.view(self.flat)
        if _compare(now.data_ptr(), target.data_ptr(), slot.nbytes) == 0:
            return False
        target.copy_(now)
        return True

    def forget(self) -> None:
        """Send everything again next time."""
        self.structure = None


class Replica:
    """A module on a serving rank. Not collective.

    Args:
        module: its parameters are replaced by others with the same memory and no hooks: those of
            rank 0's parameters run there.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._slots: list[Slot] = []
        self._owners: list[tuple[torch.nn.Module, str]] = []
        self._placed: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._shared: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        self._originals: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All parameters and buffers, in the order that the ranks agree on."""
        return self._placed

    def resize(self, slots: list[Slot]) -> None:
        """Make room for what the runs bring."""
        self._slots = slots
        end = slots[-1].begin + slots[-1].nbytes if slots else 0
        self.flat = torch.zeros(end, dtype=torch.uint8, device="cpu")

    def check(self) -> None:
        """Raise RuntimeError if this rank's module has other parameters or buffers than rank 0's.

        To be called when the slots are new.
        """
        mine = list(_tensors(self.module))
        found = [(name, tuple(t.shape), t.dtype) for name, t in mine]
        wanted = [(slot.name, slot.shape, slot.dtype) for slot in self._slots]
        if found != wanted:
            both = zip(found + [None] * len(wanted), wanted + [None] * len(found), strict=False)
            ours, theirs = next((a, b) for a, b in both if a != b)
            raise RuntimeError(
                f"this rank's module differs from rank 0's: {_in_words(ours)} here, "
                f"{_in_words(theirs)} there. Construct the same module on every rank"
            )
        places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        for inner in self.module.modules():
            for name, tensor in [*inner._parameters.items(), *inner._buffers.items()]:
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((inner, name))
        self._placed = []
        self._versions = [-1] * len(mine)
        for number, (_, tensor) in enumerate(mine):
            self._shared[number] = places[id(tensor)]
            self._placed.append(tensor)
            if isinstance(tensor, torch.nn.Parameter):
                self._originals += [(*place, tensor) for place in places[id(tensor)]]
                self._place(number, torch.nn.Parameter(tensor.detach(), tensor.requires_grad))

    def apply(self, change: Change) -> None:
        """Put in place what has changed, and take back what the last pass did to buffers."""
        changed = set(change.changed)
        inner = list(self.module.modules())
        for number, attributes in change.attributes.items():
            vars(inner[number]).update(attributes)
        for number, slot in enumerate(self._slots):
            tensor, flag = self._placed[number], change.flags[number]
            if not isinstance(tensor, torch.nn.Parameter):
                self._renew(number, slot, flag, number in changed)
                continue
            if number in changed:
                with torch.no_grad():
                    tensor.copy_(slot.view(self.flat))
            if tensor.requires_grad != flag:
                # Graphs that are still needed keep the old one.
                self._place(number, torch.nn.Parameter(tensor.detach(), flag))

    def refresh(self) -> None:
        """Take back what the last pass did to buffers, as a new replica of torch would have it."""
        for number, slot in enumerate(self._slots):
            if not isinstance(self._placed[number], torch.nn.Parameter):
                self._renew(number, slot, self._placed[number].requires_grad, False)

    def put_back(self) -> None:
        """Give the module its own parameters again, which have the same memory."""
        for owner, name, parameter in self._originals:
            setattr(owner, name, parameter)

    def _renew(self, number: int, slot: Slot, flag: bool, changed: bool) -> None:
        """Make a new buffer if it is not what rank 0 has: graphs may need the old one."""
        owner, name = self._shared[number][0]
        now = owner._buffers.get(name)
        if changed or now is not self._placed[number] or now._version != self._versions[number]:
            device = self._placed[number].device
            fresh = slot.view(self.flat).clone().to(device).requires_grad_(flag)
            self._place(number, fresh)
            self._versions[number] = fresh._version

    def _place(self, number: int, tensor: torch.Tensor) -> None:
        for owner, name in self._shared[number]:
            setattr(owner, name, tensor)
        self._placed[number] = tensor


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _structure(module: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> list[Any]:
    found: list[Any] = []
    for name, inner in module.named_modules():
        own = vars(inner)
        found.append((name, type(inner), *(len(own.get(kind) or ()) for kind in _HOOKS)))
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise RuntimeError(
                f"{name} is not initialised yet. Call the module once on a small batch before "
                f"DataParallel does"
            )
        found.append((name, tuple(tensor.shape), tensor.dtype, tensor.device.type))
    return found


def _layout(tensors: list[tuple[str, torch.Tensor]]) -> list[Slot]:
    slots, begin = [], 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        slots.append(Slot(name, tuple(tensor.shape), tensor.dtype, begin, nbytes))
        begin += -(-nbytes // _ALIGNED) * _ALIGNED
    return slots


def _extend(runs: list[tuple[int, int]], slot: Slot) -> None:
    end = slot.begin + slot.nbytes
    if runs and slot.begin - runs[-1][1] < _ALIGNED:
        runs[-1] = (runs[-1][0], end)
    elif slot.nbytes:
        runs.append((slot.begin, end))


def _plain_attributes(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    kind = type(value)
    return kind in _PLAIN or (kind is tuple and all(map(_is_plain, value)))  # type: ignore[call-overload]


def _in_words(slot: tuple[str, tuple[int, ...], torch.dtype] | None) -> str:
    if slot is None:
        return "nothing"
    return f"{slot[0]} of shape {slot[1]} and {slot[2]}"


def _memcmp() -> Any:
    function = ctypes.CDLL(None).memcmp
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_int
    return function


_compare = _memcmp()

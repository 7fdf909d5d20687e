"""Scaling of means that lie once for the ranks of a node, as by a clip.

Note [A clip that is put off]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch's clip multiplies all gradients on every rank. What a rank writes to shared means takes memory
of its own, and a page fault for each page: five times the time of the clip itself. But the ranks
find the same norm. So a clip of shared means is only noted. When the ranks meet for the step, and
all have noted the same, each multiplies its part of the means, once for all ranks.

Until then whoever reads `.grad` of such a parameter gets it multiplied at once, in pages of this
rank's own. `Parameter.grad` is a property of ours for that time. The same is done before a backward
adds to the gradient, and on all ranks if they have not noted the same. A gradient that the program
has taken before the clip is not put off.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpiddp.torch_internals.compiler_loading import disable_compilation

if TYPE_CHECKING:
    from mpiddp.ddp.node_parts import BucketLayout
    from mpiddp.ddp.torch_reducer import TorchReducer

__all__ = ["MeanScaling", "Scaled", "gradient_of", "scale_means", "set_gradient"]

_plain: Any = torch.Tensor.grad
# What torch's own attribute does, whatever was put off.
gradient_of = _plain.__get__
set_gradient = _plain.__set__

_storage_users: Callable[[int], int] = torch._C._storage_Use_Count

# Where torch's clip is, and frames between it and what it calls.
_CLIP, _NEAR = "torch.nn.utils.clip_grad", 6

# Of each parameter that is shared: what scales it, and its index there.
_known: dict[int, tuple[weakref.ref[MeanScaling], int]] = {}
# Those of them that are yet to be multiplied on this rank.
_waiting: set[int] = set()


class Scaled(Protocol):
    """Parameters that a node's ranks share, as far as scaling needs to know them."""

    reducer: TorchReducer
    parameters: list[torch.Tensor]
    layouts: list[BucketLayout]

    @property
    def rank(self) -> int:
        """This rank's number in the node."""

    def lies_once(self, index: int, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is the mean that lies once for all ranks. Not collective."""


def scale_means(
    shared: Scaled, factors: Mapping[int, torch.Tensor | float], hidden: Iterable[int]
) -> None:
    """Multiply means where they lie. Collective in this order: meet, call it, meet.

    Args:
        shared: the parameters.
        factors: by index of the parameter, the same on all ranks.
        hidden: those of them that this rank has to multiply where it has written, too.
    """
    hidden = set(hidden)
    for bucket, layout in zip(shared.reducer.buckets, shared.layouts, strict=True):
        own = [index for index in layout.starts if index in factors]
        means = bucket.means
        if means is None:
            for index in own:
                bucket.gradients[layout.starts[index] : layout.stop(index)].mul_(factors[index])
            continue
        for index in own:
            for start, stop, owner in layout.parts(layout.starts[index], layout.stop(index)):
                if owner == shared.rank:
                    means[start:stop].mul_(factors[index])
        for start, stop in bucket.own_elements() if own else ():
            for index in hidden.intersection(own):
                low, high = max(start, layout.starts[index]), min(stop, layout.stop(index))
                if low < high:
                    bucket.gradients[low:high].mul_(factors[index])


class MeanScaling:
    """What was put off for the parameters that a node's ranks share. Not collective.

    Args:
        shared: these.
    """

    def __init__(self, shared: Scaled) -> None:
        self._shared = weakref.ref(shared)
        self._parameters = shared.parameters
        self._factors: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []
        _install()
        reference = weakref.ref(self)
        keys = [id(parameter) for parameter in shared.parameters]
        weakref.finalize(self, _forget, keys).atexit = False
        _known.update((key, (reference, index)) for index, key in enumerate(keys))

    @property
    def digest(self) -> int:
        """A number that stands for what was noted: 0 for nothing."""
        if not self._factors:
            return 0
        noted = [(index, factor.item()) for index, factor in sorted(self._factors.items())]
        return 1 + zlib.crc32(repr(noted).encode())

    @property
    def factors(self) -> dict[int, torch.Tensor]:
        """What was noted, by index of the parameter."""
        return dict(self._factors)

    def note(self, index: int, factor: torch.Tensor, users: int) -> bool:
        """Put off the multiplication of one gradient; return whether that can be.

        Args:
            index: of the parameter.
            factor: a number as a tensor.
            users: references to the gradient that the caller has.
        """
        parameter = self._parameters[index]
        shared = self._shared()
        counted, in_storage = _count_users(parameter)
        gradient = gradient_of(parameter)
        if (
            shared is None
            or gradient is None
            or index in self._factors
            or not (isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad)
            or getattr(type(parameter), "grad", None) not in (_plain, _property)
            or not shared.lies_once(index, gradient)
            # Somebody has it already, and would not read it again.
            or counted > _users_of_nobody()[0] + users
            or in_storage > _users_of_nobody()[1]
        ):
            return False
        self._factors[index] = factor
        _waiting.add(id(parameter))
        torch.nn.Parameter.grad = _property  # type: ignore[assignment]
        hook = functools.partial(_before_accumulation, weakref.ref(self), index)
        self._hooks.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
        return True

    def note_of_others(self, factors: Mapping[int, torch.Tensor]) -> None:
        """Note what other ranks have, on a rank without inputs."""
        self._factors.update(factors)

    def multiply(self, index: int) -> None:
        """Multiply one gradient on this rank now, if that was put off."""
        parameter = self._parameters[index]
        if id(parameter) in _waiting:
            self.drop(index)
            with torch.no_grad():
                gradient_of(parameter).mul_(self._factors[index])

    def drop(self, index: int) -> None:
        """Note that this rank has no use for one gradient any more."""
        _waiting.discard(id(self._parameters[index]))
        _restore()

    def multiply_all(self) -> None:
        """Multiply now what was put off, and forget it."""
        for index in list(self._factors):
            self.multiply(index)
        self.forget()

    def multiply_once(self) -> None:
        """Multiply what all ranks have noted, once for them. Collective, as `scale_means` is."""
        shared = self._shared()
        if self._factors and shared is not None:
            hidden = [i for i in self._factors if id(self._parameters[i]) in _waiting]
            with torch.no_grad():
                scale_means(shared, self._factors, hidden)
        self.forget()

    def forget(self) -> None:
        """Forget what was noted. Not collective."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for index in self._factors:
            _waiting.discard(id(self._parameters[index]))
        self._factors = {}
        _restore()


def _before_accumulation(
    reference: weakref.ref[MeanScaling], index: int, gradient: torch.Tensor
) -> None:
    scaling = reference()
    if scaling is not None:
        scaling.multiply(index)


def _forget(keys: Iterable[int]) -> None:
    for key in keys:
        _known.pop(key, None)
        _waiting.discard(key)
    _restore()


def _restore() -> None:
    if not _waiting and "grad" in vars(torch.nn.Parameter):
        del torch.nn.Parameter.grad


def _read(parameter: Any) -> Any:
    if id(parameter) in _waiting and not torch.compiler.is_compiling():
        # Dynamo looks at all of a parameter that it meets. What compiled code reads it reads later.
        reader = str(sys._getframe(1).f_globals.get("__name__"))
        if not reader.startswith(("torch._dynamo.", "torch._subclasses.")):
            _call(MeanScaling.multiply, parameter)
    return gradient_of(parameter)


def _write(parameter: Any, gradient: Any) -> None:
    if id(parameter) in _waiting:
        _call(MeanScaling.drop, parameter)
    set_gradient(parameter, gradient)


def _delete(parameter: Any) -> None:
    _write(parameter, None)


def _call(method: Callable[[MeanScaling, int], None], parameter: Any) -> None:
    reference, index = _known[id(parameter)]
    scaling = reference()
    if scaling is not None:
        method(scaling, index)


_property = property(_read, _write, _delete, _plain.__doc__)


@functools.cache
def _install() -> None:
    """Let torch's clip ask. Once a process."""
    from torch.nn.utils import clip_grad

    module: Any = clip_grad
    clip: Callable[..., None] = module._clip_grads_with_norm_

    @disable_compilation
    @functools.wraps(clip)
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
    ) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(id(parameter) in _known for parameter in parameters):
            with torch.no_grad():
                factor = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
            users = int(_is_called_by(sys._getframe(), "clip_grad_norm_"))  # which has all of them
            parameters = [each for each in parameters if not _put_off(each, factor, users)]
        clip(parameters, max_norm, total_norm, foreach)

    for name in ("_clip_grads_with_norm_", "clip_grads_with_norm_"):
        for place in (module, torch.nn.utils):
            if getattr(place, name, None) is clip:
                setattr(place, name, clip_grads_with_norm_)


def _count_users(parameter: Any) -> tuple[int, int]:
    """Return the references to a gradient, and to its storage."""
    gradient = gradient_of(parameter)
    if gradient is None:
        return 0, 0
    return sys.getrefcount(gradient), _storage_users(gradient.untyped_storage()._cdata)


@functools.cache
def _users_of_nobody() -> tuple[int, int]:
    """Return what is counted where only a bucket and the parameter have a gradient."""
    parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    bucket = [torch.zeros(1, device="cpu")]
    set_gradient(parameter, bucket[0])
    return _count_users(parameter)


def _is_called_by(frame: types.FrameType | None, name: str) -> bool:
    for _ in range(_NEAR):
        if frame is None:
            return False
        if frame.f_code.co_name == name and frame.f_globals.get("__name__") == _CLIP:
            return True
        frame = frame.f_back
    return False


def _put_off(parameter: torch.Tensor, factor: torch.Tensor, users: int) -> bool:
    reference, index = _known.get(id(parameter), (None, 0))
    scaling = None if reference is None else reference()
    if scaling is None:
        return False
    if factor == 1:
        return gradient_of(parameter) is not None  # nothing would change
    return scaling.note(index, factor, users)

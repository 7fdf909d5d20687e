"""The random numbers that a rank goes on with: torch's, Python's, numpy's, and its GPU's."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import random
import sys
from typing import Any

import torch
from torch import Tensor

__all__ = ["current", "derive", "packed", "put_back", "unpacked"]

# What pickles of this process's Python begin with, and those of mpiddp 0.x: see `_of_a_pickle`.
_PICKLE = b"\x80"

# What the states of numpy's generators were pickled by.
_OF_NUMPY = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
}


def current() -> dict[str, Any]:
    """Return the states of the global generators that this process has. Not collective."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        states["numpy"] = numpy.get_state(legacy=False)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put_back(states: dict[str, Any]) -> None:
    """Let the generators go on from `states`, which may be another process's. Not collective."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])  # noqa: NPY002  # the user's is the global one
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def derive(source: Tensor, rank: int) -> None:
    """Begin streams that follow from another rank's packed states, and from `rank` alone.

    Not collective.
    """
    digest = hashlib.sha256(_bytes_of(source) + str(rank).encode()).digest()
    seed = int.from_bytes(digest[:8], "little")
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed % 2**32)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


def packed(states: dict[str, Any]) -> Tensor:
    """Return states as one small tensor, which every kind of checkpoint takes. Not collective.

    It holds JSON: what is read from a file is to run no code. Equal states give equal bytes.
    """
    text = json.dumps(states, default=_plain, sort_keys=True)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def unpacked(tensor: Tensor) -> dict[str, Any]:
    """Return what was packed. Not collective.

    Raises:
        ValueError: it is something else.
    """
    said = _bytes_of(tensor)
    try:
        if said.startswith(_PICKLE):
            return _of_a_pickle(said)
        states: dict[str, Any] = json.loads(said, object_hook=_from_plain)
        version, numbers, last = states["python"]
        return states | {"python": (version, tuple(numbers), last)}
    except (pickle.UnpicklingError, KeyError, TypeError) as error:
        raise ValueError(f"these are no random states: {error}") from error


def _plain(value: Any) -> Any:
    """Return a tensor or an array of numpy in a form that JSON has."""
    if isinstance(value, Tensor):
        return {"tensor": _bytes_of(value).hex()}
    if type(value).__module__ == "numpy":
        return {"array": value.tolist(), "dtype": value.dtype.str}
    raise TypeError(f"the state of a generator has a {type(value).__name__}")


def _from_plain(found: dict[str, Any]) -> Any:
    if found.keys() == {"tensor"}:
        return torch.frombuffer(bytearray.fromhex(found["tensor"]), dtype=torch.uint8)
    if found.keys() == {"array", "dtype"}:
        import numpy

        return numpy.array(found["array"], found["dtype"])
    return found


class _OfStates(pickle.Unpickler):
    """Knows the arrays of numpy, and no other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _OF_NUMPY:
            raise pickle.UnpicklingError(f"{module}.{name} is not in a generator's state")
        return super().find_class(module, name)


def _of_a_pickle(said: bytes) -> dict[str, Any]:
    """Read what was packed until mpiddp packed JSON: checkpoints of that time are still there."""
    plain: dict[str, Any] = _OfStates(io.BytesIO(said)).load()
    return {
        name: torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if isinstance(state, bytes)
        else state
        for name, state in plain.items()
    }


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())

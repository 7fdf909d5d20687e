"""The random numbers that a rank goes on with: torch's, Python's, numpy's, and its GPU's."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from typing import Any

import torch
from torch import Tensor

__all__ = ["current", "derive", "packed", "put_back", "unpacked"]


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
    """Return states as one small tensor, which every kind of checkpoint takes. Not collective."""
    # Of a tensor, pickle writes an address as well, and equal states are to give equal bytes.
    plain = {
        name: _bytes_of(state) if isinstance(state, Tensor) else state
        for name, state in states.items()
    }
    return torch.frombuffer(bytearray(pickle.dumps(plain)), dtype=torch.uint8)


def unpacked(tensor: Tensor) -> dict[str, Any]:
    """Return what was packed. Not collective."""
    plain: dict[str, Any] = pickle.loads(_bytes_of(tensor))  # noqa: S301  # of the user's state
    return {
        name: torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if isinstance(state, bytes)
        else state
        for name, state in plain.items()
    }


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())

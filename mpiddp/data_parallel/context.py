"""What a thread of torch has around a forward pass: recorded on rank 0, entered on the others.

Replicas of torch's DataParallel are threads of one process. So gradient mode, inference mode,
autocast, the default dtype and the choice of deterministic algorithms hold for all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["RandomState", "current", "draw_from", "entered", "keep_random_state"]

_DEVICES = ("cpu", "cuda")


def current() -> dict[str, Any]:
    """Return what holds in this thread now. Not collective."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _DEVICES
        ],
        "cache": torch.is_autocast_cache_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
    }


@contextlib.contextmanager
def entered(state: dict[str, Any]) -> Iterator[None]:
    """Within, what rank 0 had holds here. Not collective."""
    if torch.get_default_dtype() != state["dtype"]:
        torch.set_default_dtype(state["dtype"])
    if torch.are_deterministic_algorithms_enabled() != state["deterministic"]:
        torch.use_deterministic_algorithms(state["deterministic"], warn_only=state["warn_only"])
    with contextlib.ExitStack() as stack:
        if state["inference"]:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(state["grad"]))
        for device, enabled, dtype in state["autocast"]:
            if enabled:
                entry = torch.autocast(device, dtype, cache_enabled=state["cache"])
                stack.enter_context(entry)
        yield


class RandomState:
    """Chooses the seeds of the other ranks by rank 0's generator, which draws nothing for it.

    The same state of rank 0's generator gives the same numbers on all ranks: after the same
    `torch.manual_seed`, or where a checkpoint computes again. If rank 0 has drawn nothing since the
    last forward pass, the others go on with the numbers that they have.
    """

    def __init__(self) -> None:
        self._before = self._after = b""

    def seed(self) -> bytes | None:
        """Return what the seeds come from; None: the others go on. Not collective."""
        state = _digest()
        unchanged = state == self._before == self._after
        self._before = state
        return None if unchanged else state

    def passed(self) -> None:
        """Note that rank 0 has computed its part. Not collective."""
        self._after = _digest()


def draw_from(seed: bytes, rank: int) -> None:
    """Seed the generators of torch, Python and numpy for one rank. Not collective."""
    digest = hashlib.blake2b(seed + rank.to_bytes(4, "little"), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)


@contextlib.contextmanager
def keep_random_state() -> Iterator[None]:
    """After it, the generators of torch and Python are as they were. Not collective."""
    before, python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.set_rng_state(before)
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def _digest() -> bytes:
    state = torch.get_rng_state().numpy().tobytes()
    return hashlib.blake2b(state, digest_size=16).digest()

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

__all__ = ["current", "draw_from", "entered", "keep_random_state", "random_states"]

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


def random_states() -> dict[str, bytes]:
    """Return what stands for the states of this process's generators. Not collective.

    The other ranks' numbers follow from rank 0's generators, each from its like: after the same
    `torch.manual_seed` they come again, also where a checkpoint computes again. Rank 0 draws
    nothing for it.
    """
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        # Its hash: the state is a tuple of 625 integers.
        "random": hash(random.getstate()[1]).to_bytes(8, "little", signed=True),
    }
    if "numpy" in sys.modules:
        _, keys, position, *_ = sys.modules["numpy"].random.get_state()
        states["numpy"] = keys.tobytes() + position.to_bytes(4, "little")
    return {kind: hashlib.blake2b(state, digest_size=16).digest() for kind, state in states.items()}


def draw_from(states: dict[str, bytes], rank: int) -> None:
    """Seed the generators of torch, Python and numpy for one rank. Not collective.

    Args:
        states: what `random_states` has returned on rank 0.
        rank: of this process.
    """
    for kind, state in states.items():
        digest = hashlib.blake2b(state + rank.to_bytes(4, "little"), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        if kind == "torch":
            torch.manual_seed(seed)
        elif kind == "random":
            random.seed(seed)
        elif "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)


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

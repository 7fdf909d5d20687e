"""What the ranks compare before they work together, so that no rank waits for one that differs.

A setting that is wrong or different on one rank changes what is sent or who makes progress: the
others would hang, or add bytes that are no gradient. So errors are raised only after the
comparison, and then on all ranks.
"""

from __future__ import annotations

import array
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from mpiddp.mpi import addresses
from mpiddp.settings import JOIN, SETTINGS
from mpiddp.system import kernels
from mpiddp.version import __version__

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["compare_debug_levels", "compare_settings", "compared"]

_DEBUG_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"
# With it torch adds a barrier when a group is made.
_BARRIER_VARIABLE = "TORCH_DIST_INIT_BARRIER"

# How many differences an error shows.
_SHOWN = 4


def compare_settings(
    communicator: MPI.Intracomm, check: Callable[[], object], comes_to: Path | None = None
) -> None:
    """Raise on all ranks unless all settings are valid, and equal where they must be.

    Collective over `communicator`: one all-reduce of 16 bytes while all is well.

    Args:
        communicator: of all ranks; nothing else is under way in it.
        check: raises ValueError or RuntimeError where this rank cannot take part.
        comes_to: the folder of the job that these ranks are about to join, None: they are at work
            already, or have come.

    Raises:
        ValueError: a setting of some rank is wrong.
        RuntimeError: what `check` raised here or elsewhere; or the ranks differ.
    """
    error = _own_error(check)
    own = compared() if error is None else {}
    if error is None:
        # Some would wait for the job there, and the others for them.
        own[JOIN.name] = "unset" if comes_to is None else str(comes_to)
    told = (None if error is None else (type(error) is ValueError, str(error)), own)
    if _all_equal(communicator, repr(told)):
        if error is not None:
            raise error
        return
    everyone = communicator.allgather(told)
    for rank, (problem, _) in enumerate(everyone):
        if problem is not None:
            wrong_value, text = problem
            raise (ValueError if wrong_value else RuntimeError)(f"rank {rank}: {text}") from error
    raise RuntimeError(_differences([values for _, values in everyone]))


def compare_debug_levels(communicator: MPI.Intracomm, ranks: Sequence[int]) -> None:
    """Raise on all ranks of a new group unless all, or none, are to compare their collectives.

    Collective over `communicator`.

    Args:
        communicator: of the group; nothing else is under way in it.
        ranks: the world rank of each of its ranks.

    Raises:
        RuntimeError: the debug level is DETAIL on some ranks only.
    """
    from mpi4py import MPI

    detail = _debug_level() == DebugLevel.DETAIL.name
    # The smallest, and the opposite of the largest.
    own, least = array.array("b", [detail, -detail]), array.array("b", [0, 0])
    communicator.Allreduce([own, MPI.SIGNED_CHAR], [least, MPI.SIGNED_CHAR], op=MPI.MIN)
    if least[0] != -least[1]:
        everyone = [{_DEBUG_VARIABLE: level} for level in communicator.allgather(_debug_level())]
        raise RuntimeError(_differences(everyone, ranks))


def compared() -> dict[str, str]:
    """Return by name what must be the same on all ranks, as it is on this one. Not collective."""
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return {
        **{setting.name: setting.describe() for setting in SETTINGS if setting.same_on_all_ranks},
        _DEBUG_VARIABLE: _debug_level(),
        _BARRIER_VARIABLE: os.environ.get(_BARRIER_VARIABLE, "0"),
        "mpiddp": f"version {__version__}",
        # Its builds for CPUs and GPUs may work together.
        "torch": f"version {torch.__version__.partition('+')[0]}",
        "MPI": f"{name} {'.'.join(map(str, version))}",
    }


def _own_error(check: Callable[[], object]) -> ValueError | RuntimeError | None:
    try:
        for setting in SETTINGS:
            setting.read()
        kernels.selected()
        addresses.check()
        check()
    except (ValueError, RuntimeError) as error:
        return error
    return None


def _debug_level() -> str:
    # OFF and INFO send the same.
    level = get_debug_level()
    return level.name if level == DebugLevel.DETAIL else "OFF or INFO"


def _all_equal(communicator: MPI.Intracomm, text: str) -> bool:
    """Return whether all ranks have the same text. Collective."""
    from mpi4py import MPI

    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    own, least = array.array("q", digest), array.array("q", [0, 0])
    # The smallest, and the complement of the largest.
    own.append(~own[0])
    communicator.Allreduce([own, MPI.INT64_T], [least, MPI.INT64_T], op=MPI.MIN)
    return least[0] == ~least[1]


def _differences(everyone: Sequence[Mapping[str, str]], ranks: Sequence[int] = ()) -> str:
    """Return in words what differs between the ranks; `ranks` are their world ranks."""
    found = []
    for name, first in everyone[0].items():
        for place, values in enumerate(everyone):
            if values[name] != first:
                here, there = (ranks[0], ranks[place]) if ranks else (0, place)
                found.append(f"{name} is {first} on rank {here} and {values[name]} on rank {there}")
                break
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{'; '.join(found[:_SHOWN])}{more}: it must be the same on all ranks"

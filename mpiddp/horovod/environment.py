"""The environment variables of Horovod: those that mean something here, and all others."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

__all__ = ["Settings", "name_the_others", "read"]

logger = logging.getLogger("mpiddp.horovod")

# The defaults are those of Horovod 0.28.
_FUSION_BYTES = 128 << 20
_STALL_SECONDS = 60.0

HONOURED = (
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_STALL_CHECK_DISABLE",
    "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "HOROVOD_TIMELINE",
    "HOROVOD_TIMELINE_MARK_CYCLES",
    # Sets can be added at any time here, with and without it.
    "HOROVOD_DYNAMIC_PROCESS_SETS",
)

_named = False


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    Attributes:
        fusion_bytes: all-reduces that can start together are one, up to so many bytes. 0: never.
        stall_seconds: after so long a wait for other ranks comes a warning; 0: never.
        stall_error_seconds: after so long comes an error; 0: never.
        timeline: the file of the timeline of rank 0; empty: none.
        mark_cycles: whether that has marks where operations were decided on.
    """

    fusion_bytes: int = _FUSION_BYTES
    stall_seconds: float = _STALL_SECONDS
    stall_error_seconds: float = 0.0
    timeline: str = ""
    mark_cycles: bool = False


def read() -> Settings:
    """Return what the environment says. Not collective.

    Raises:
        ValueError: a variable does not hold a number where it must.
    """
    disabled = _is_on("HOROVOD_STALL_CHECK_DISABLE")
    timeline = os.environ.get("HOROVOD_TIMELINE", "")
    return Settings(
        int(_number("HOROVOD_FUSION_THRESHOLD", _FUSION_BYTES)),
        0.0 if disabled else _number("HOROVOD_STALL_CHECK_TIME_SECONDS", _STALL_SECONDS),
        0.0 if disabled else _number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        "" if timeline == "DYNAMIC" else timeline,
        _is_on("HOROVOD_TIMELINE_MARK_CYCLES"),
    )


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").strip() not in ("", "0")


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number from 0 on, not {text!r}")
    return value


def name_the_others() -> None:
    """Log, once a process and at debug level, which variables have no effect. Not collective."""
    global _named
    others = sorted(
        name for name in os.environ if name.startswith("HOROVOD_") and name not in HONOURED
    )
    if others and not _named:
        _named = True
        logger.debug("variables of Horovod that have no effect in mpiddp: %s", ", ".join(others))

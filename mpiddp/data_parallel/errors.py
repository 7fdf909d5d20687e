"""An exception of another rank: sent as text, raised on rank 0 as the same type."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

from mpiddp.data_parallel import pickling

__all__ = ["describe", "rebuild"]


class _KeyText(str):
    """A message that KeyError shows as it is, with its line ends."""

    def __repr__(self) -> str:
        return str(self)


def describe(error: BaseException, where: str) -> dict[str, Any]:
    """Return an exception as plain values. Not collective.

    Args:
        error: what was raised on this rank.
        where: such as "on rank 2, in forward of its part of the batch".
    """
    kind: type[BaseException] = type(error)
    if not isinstance(error, Exception):
        kind = RuntimeError  # a SystemExit of one replica must not end rank 0
    try:
        sent = pickling.pack(kind).body
    except Exception:
        sent = pickle.dumps(RuntimeError)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"type": sent, "text": f"{type(error).__name__} {where}:\n{text.rstrip()}"}


def rebuild(described: dict[str, Any]) -> Exception:
    """Return an exception of the same type, with the other rank's traceback as its message.

    Not collective. A type that cannot be made from one string becomes a RuntimeError.
    """
    text = described["text"]
    try:
        kind = pickling.unpack(described["type"], [])
        error = kind(_KeyText(text) if issubclass(kind, KeyError) else text)
        if isinstance(error, Exception):
            return error
    except Exception:  # noqa: S110  # the text tells it, too
        pass
    return RuntimeError(text)

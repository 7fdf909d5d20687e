"""How ranks ask the store of rank 0: a message is a number and some strings of bytes.

Only connections that have proved themselves speak so, see entrance.py.
"""

from __future__ import annotations

import struct

__all__ = ["NO", "YES", "packed", "unpacked"]

# What an answer begins with.
YES, NO = 0, 1

# The number, and how many strings; then the length of each.
_HEAD = struct.Struct("!BI")


def packed(number: int, parts: list[bytes]) -> bytes:
    """Return a message. Not collective."""
    lengths = struct.pack(f"!{len(parts)}Q", *map(len, parts))
    return b"".join((_HEAD.pack(number, len(parts)), lengths, *parts))


def unpacked(said: bytearray) -> tuple[int, list[bytes]] | None:
    """Take the first message away from what was said; None if it is not whole. Not collective."""
    if len(said) < _HEAD.size:
        return None
    number, count = _HEAD.unpack_from(said)
    begin = _HEAD.size + 8 * count
    if len(said) < begin:
        return None
    lengths = struct.unpack_from(f"!{count}Q", said, _HEAD.size)
    end = begin + sum(lengths)
    if len(said) < end:
        return None
    parts = []
    with memoryview(said) as whole:
        for length in lengths:
            parts.append(bytes(whole[begin : begin + length]))
            begin += length
    del said[:end]
    return number, parts

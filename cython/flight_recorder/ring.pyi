from collections.abc import Callable, Sequence
from typing import Any

import torch

# The record's id, its source, its number there; the call, None for a bucket; the elements of a
# bucket and their dtype; when it began, started and ended, in seconds on the monotonic clock, 0 for
# not yet, and -1 for an end in failure; the thread; the frames: name, file, line.
Record = tuple[
    int,
    int,
    int,
    tuple[str, object, torch.dtype | None, Sequence[int], int] | None,
    int,
    torch.dtype | None,
    float,
    float,
    float,
    int,
    list[tuple[str, str, int]],
]

# The source, the number there; the call, None for a bucket; the elements of a bucket and their
# dtype; when it began, started and ended (-1: in failure); the thread; of a bucket when its first
# and its last gradient came, when it was waited for, when its first and its last chunk were sent,
# 0: not known.
Taken = tuple[
    int,
    int,
    tuple[str, object, torch.dtype | None, Sequence[int], int] | None,
    int,
    torch.dtype | None,
    float,
    float,
    float,
    int,
    float,
    float,
    float,
    float,
    float,
]

def allocate(size: int) -> None: ...
def begin(
    source: int,
    number: int,
    call: tuple[str, object, torch.dtype | None, Sequence[int], int],
    message: bool = False,
    at_once: bool = False,
) -> int: ...
def attach(id_: int, address: int) -> None: ...
def oldest() -> Record | None: ...
def started(id_: int) -> None: ...
def ended(id_: int) -> None: ...
def failed(id_: int) -> None: ...
def fail_source(source: int) -> None: ...
def find_call(
    source: int, number: int
) -> tuple[tuple[str, object, torch.dtype | None, Sequence[int], int], bool] | None: ...
def snapshot() -> list[Record]: ...
def trace(
    taker: Callable[[], None] | None, reduced: Callable[[Any], None] | None = None
) -> int: ...
def take(since: int, unfinished: list[int]) -> tuple[int, list[Taken], list[int], int]: ...
def first() -> int: ...
def under_way() -> int: ...
def seconds_per_bucket(count: int) -> float: ...

from collections.abc import Sequence

import torch

from mpiddp.engine.requests import Pending

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

def allocate(size: int) -> None: ...
def begin(
    source: int,
    number: int,
    call: tuple[str, object, torch.dtype | None, Sequence[int], int],
    message: bool = False,
    at_once: bool = False,
) -> int: ...
def attach(id_: int, pending: Pending) -> None: ...
def oldest() -> Record | None: ...
def started(id_: int) -> None: ...
def ended(id_: int) -> None: ...
def failed(id_: int) -> None: ...
def fail_source(source: int) -> None: ...
def find_call(
    source: int, number: int
) -> tuple[tuple[str, object, torch.dtype | None, Sequence[int], int], bool] | None: ...
def snapshot() -> list[Record]: ...
def first() -> int: ...
def under_way() -> int: ...
def seconds_per_bucket(count: int) -> float: ...

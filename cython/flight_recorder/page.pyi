from typing import NamedTuple

BYTES: int

class Operation(NamedTuple):
    words: str
    source: str
    number: int
    began: float
    ended: float

class Bucket(NamedTuple):
    source: str
    number: int
    began: float
    ended: float

Layout = dict[str, int | list[int | str]]

def share() -> int: ...
def descriptor() -> int: ...
def layout() -> Layout: ...
def leave() -> None: ...
def name(number: int, words: str) -> None: ...
def read(memory: bytes) -> tuple[Operation | None, Bucket | None, bool]: ...

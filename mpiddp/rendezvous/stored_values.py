"""What the store of torch.distributed holds, on rank 0: values by key, queues, and who waits.

The semantics are those of torch's TCPStore, down to what `COMPARE` answers for a key that is not
there. It knows no connections; all threads of rank 0 may use it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field

__all__ = ["Answer", "Operation", "Values", "Waiter"]

# None is the answer of a store that is closed, or that cannot do this with what is there.
Answer = Callable[["list[bytes] | None"], object]


class Operation:
    """What can be asked; the numbers travel between ranks.

    Attributes:
        PUT: keys and values in turn.
        GET: keys; answers their values when all are there.
        WAIT: keys; answers when all are there.
        CHECK: keys; answers 1 or 0.
        ADD: a key and a number; answers the sum.
        APPEND: a key and what is put behind its value.
        COMPARE: a key, what it should be, and what it then is to be; answers what it is.
        DELETE: a key; answers 1 or 0.
        COUNT: nothing; answers how many keys there are.
        KEYS: how they begin; answers those keys.
        PUSH: the key of a queue, and what is to be its last value.
        POP: the key of a queue; answers its first value when there is one, and removes it.
        TAKE: the same, but answers nothing if there is none.
        LENGTH: the key of a queue; answers how many values it has.
    """

    PUT, GET, WAIT, CHECK, ADD, APPEND, COMPARE, DELETE, COUNT = range(9)
    KEYS, PUSH, POP, TAKE, LENGTH = range(9, 14)

    WAITING = (GET, WAIT, POP)


@dataclass(eq=False)
class Waiter:
    """Somebody who waits for keys."""

    keys: list[bytes]
    operation: int
    answer: Answer
    missing: bytes = field(default=b"", init=False)


class Values:
    """Values by key. Not collective."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[bytes, bytes] = {}
        # None is empty.
        self._queues: dict[bytes, deque[bytes]] = {}
        # By the first key that each of them misses.
        self._waiting: dict[bytes, list[Waiter]] = {}
        self._closed = False

    def ask(self, operation: int, parts: list[bytes], answer: Answer) -> Waiter | None:
        """Call `answer` with what the operation gives, at once or when the keys are there.

        It is called with a lock held: it must not wait, nor ask.

        Returns:
            who waits, to be given to `forget`; None if there was an answer.
        """
        with self._lock:
            if self._closed:
                answer(None)
            elif operation in Operation.WAITING:
                waiter = Waiter(parts, operation, answer)
                return waiter if self._has_to_wait(waiter) else None
            else:
                try:
                    answer(self._do(operation, parts))
                except (ValueError, IndexError):  # a sum with what is no number
                    answer(None)
            return None

    def forget(self, waiter: Waiter) -> None:
        """Do not answer any more; harmless if it was answered."""
        with self._lock:
            among = self._waiting.get(waiter.missing, [])
            if waiter in among:
                among.remove(waiter)
            if not among:
                self._waiting.pop(waiter.missing, None)

    def close(self) -> None:
        """Tell all who wait that it is over."""
        with self._lock:
            self._closed = True
            for waiters in self._waiting.values():
                for waiter in waiters:
                    waiter.answer(None)
            self._waiting.clear()

    def _do(self, operation: int, parts: list[bytes]) -> list[bytes]:
        values = self._values
        if operation == Operation.PUT:
            for key, value in zip(parts[::2], parts[1::2], strict=True):
                self._put(key, value)
            return []
        if operation == Operation.CHECK:
            return [b"%d" % all(key in values or key in self._queues for key in parts)]
        if operation == Operation.ADD:
            total = b"%d" % (int(values.get(parts[0], b"0")) + int(parts[1]))
            self._put(parts[0], total)
            return [total]
        if operation == Operation.APPEND:
            self._put(parts[0], values.get(parts[0], b"") + parts[1])
            return []
        if operation == Operation.COMPARE:
            key, expected, desired = parts
            if values.get(key, b"") == expected:
                self._put(key, desired)
            return [values.get(key, expected)]
        if operation == Operation.DELETE:
            return [b"%d" % (values.pop(parts[0], None) is not None)]
        if operation == Operation.COUNT:
            return [b"%d" % len(values)]
        if operation == Operation.KEYS:
            return [key for key in values if key.startswith(parts[0])]
        if operation == Operation.PUSH:
            self._queues.setdefault(parts[0], deque()).append(parts[1])
            self._wake(parts[0])
            return []
        if operation == Operation.TAKE:
            return [self._pop(parts[0])] if parts[0] in self._queues else []
        if operation == Operation.LENGTH:
            return [b"%d" % len(self._queues.get(parts[0], ()))]
        raise ValueError(f"there is no operation {operation}")

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        self._wake(key)

    def _pop(self, key: bytes) -> bytes:
        values = self._queues[key]
        value = values.popleft()
        if not values:
            del self._queues[key]
        return value

    def _wake(self, key: bytes) -> None:
        for waiter in self._waiting.pop(key, ()):
            self._has_to_wait(waiter)

    def _has_to_wait(self, waiter: Waiter) -> bool:
        places: tuple[Container[bytes], ...] = {
            Operation.GET: (self._values,),
            Operation.WAIT: (self._values, self._queues),
            Operation.POP: (self._queues,),
        }[waiter.operation]
        for key in waiter.keys:
            if not any(key in place for place in places):
                waiter.missing = key
                self._waiting.setdefault(key, []).append(waiter)
                return True
        answer = []
        if waiter.operation == Operation.GET:
            answer = [self._values[key] for key in waiter.keys]
        elif waiter.operation == Operation.POP:
            answer = [self._pop(waiter.keys[0])]
        waiter.answer(answer)
        return False

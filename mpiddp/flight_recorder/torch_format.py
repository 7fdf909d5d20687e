"""The records in the format of torch's own flight recorder, version 2.10.

torch/distributed/flight_recorder in torch's wheel reads it (`torchfrtrace`). It knows backends by
name, and ours is not among them, so operations are called `gloo:all_reduce`. The buckets of a
wrapped module, and the messages from one rank to another, are operations of groups of their own:
each is in order by itself. A message that was received from any rank is not matched with its
sender's. What the format has no place for is under "mpiddp", and in each entry's "words".
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any

from mpiddp.flight_recorder import ring, sources
from mpiddp.flight_recorder.call_text import describe, describe_dtype
from mpiddp.flight_recorder.sources import BUCKETS, Source

__all__ = ["VERSION", "as_dict", "as_json", "size_wanted", "words_of"]

VERSION = "2.10"

# The states of an entry, and what torch calls the last operation of a group in each or a later one.
_STATES = {
    "scheduled": "last_enqueued_collective",
    "started": "last_started_collective",
    "completed": "last_completed_collective",
}

_DEFAULT_SIZE = 2000

# How much of a stack is kept, from the inside.
_DEEPEST = 32

# Names of ours that torch's analyzer spells in another way.
_NAMES = {
    "all_reduce_coalesced": "allreduce_coalesced",
    "broadcast of parameters or buffers": "broadcast",
    "monitored_barrier": "barrier",
}
_KNOWN = frozenset({
    "all_gather", "all_reduce", "all_to_all", "allreduce_coalesced", "barrier", "broadcast",
    "gather", "recv", "reduce", "reduce_scatter", "scatter", "send",
})  # fmt: skip

# What the analyzer says of an operation that it does not know: only the name is compared.
_UNKNOWN = "coalesced"


def size_wanted() -> int:
    """Return how many records to show: TORCH_FR_BUFFER_SIZE, or 2000. Not collective."""
    try:
        return max(int(os.environ.get("TORCH_FR_BUFFER_SIZE", _DEFAULT_SIZE)), 0)
    except ValueError:
        return _DEFAULT_SIZE


def as_dict(reason: str = "") -> dict[str, Any]:
    """Return this rank's records as torch's recorder has them, and more under "mpiddp".

    Not collective.

    Args:
        reason: why they are asked for, in words.
    """
    # Both clocks at once: records have the one, the format has the other.
    behind = time.time() - time.monotonic()
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    known = sources.known()
    records = ring.snapshot()
    entries = [
        _entry(record, known[record[1]], behind, threads)
        for record in records[max(len(records) - size_wanted(), 0) :]
        if record[1] in known
    ]
    return {
        "version": VERSION,
        "pg_config": {
            source.name: {
                "name": source.name,
                "desc": source.description,
                "ranks": str(list(source.ranks)),
            }
            for source in known.values()
        },
        "pg_status": _statuses(entries, (source.name for source in known.values())),
        "comm_lib_version": "MPI",
        "entries": entries,
        "mpiddp": {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time_ns": time.time_ns(),
            "reason": reason,
            "stacks": _stacks(threads),
        },
    }


def as_json(reason: str = "") -> str:
    """Return what `as_dict` does as JSON. Not collective."""
    return json.dumps(as_dict(reason), indent=1)


def _entry(
    record: ring.Record, source: Source, behind: float, threads: dict[int | None, str]
) -> dict[str, Any]:
    id_, number, call = record[0], record[2], record[3]
    began, started, ended, thread, frames = record[6:]
    state = "completed" if ended > 0 else "started" if started > 0 else "scheduled"
    inputs, outputs, dtypes = _sizes(record, source)
    return {
        # 0 tells torch's analyzer that nothing is missing before.
        "record_id": id_ - ring.first(),
        "pg_id": record[1],
        "process_group": (source.name, source.description),
        "collective_seq_id": number,
        "p2p_seq_id": number if source.messages else 0,
        "op_id": id_,
        "is_p2p": source.messages,
        "profiling_name": f"gloo:{_name(call, source)}",
        "input_sizes": inputs,
        "input_dtypes": dtypes,
        "output_sizes": outputs,
        "output_dtypes": dtypes,
        "state": state,
        "retired": ended != 0,
        "time_created_ns": _nanoseconds(began, behind),
        "time_discovered_started_ns": _nanoseconds(started, behind),
        "time_discovered_completed_ns": _nanoseconds(ended, behind),
        "duration_ms": (ended - began) * 1e3 if ended > 0 else None,
        "thread_id": str(thread),
        "thread_name": threads.get(thread, ""),
        "frames": [{"name": name, "filename": file, "line": line} for name, file, line in frames],
        "words": words_of(record, source),
    }


def _stacks(threads: dict[int | None, str]) -> dict[str, list[str]]:
    """Return where each thread of Python is, the innermost line first, by its name."""
    told = {}
    for thread, frame in sys._current_frames().items():
        frames = reversed(traceback.extract_stack(frame, limit=_DEEPEST))
        told[threads.get(thread, str(thread))] = [
            f"{each.filename}:{each.lineno} in {each.name}" for each in frames
        ]
    return told


def _nanoseconds(seconds: float, behind: float) -> int | None:
    return int((seconds + behind) * 1e9) if seconds > 0 else None


def _name(call: Any, source: Source) -> str:
    if call is None:
        return "all_reduce"
    name: str = _NAMES.get(call[0], call[0])
    if source.messages:
        # By position among the two, in order of their world ranks.
        if len(source.ranks) == 1:
            return "recv 0<-0"
        sender, receiver = (sorted(source.ranks).index(rank) for rank in source.ranks)
        return f"send {sender}->{receiver}" if name == "send" else f"recv {receiver}<-{sender}"
    return name if name in _KNOWN else _UNKNOWN


def _sizes(record: ring.Record, source: Source) -> tuple[list[Any], list[Any], list[str]]:
    """Return the sizes of inputs and outputs, of the first tensor each, and their dtypes."""
    call = record[3]
    if call is None:
        size = [record[4]]
        return [size], [size], [] if record[5] is None else [describe_dtype(record[5])]
    name, _, dtype, shape, _ = call
    given = [list(shape)]
    others = given
    if dtype is None:
        return [[]], [[]], []
    # As torch's analyzer checks them; both operations record the tensor of one rank.
    if name == "all_gather":
        others = [[math.prod(shape) * len(source.ranks)]]
    dtypes = [describe_dtype(dtype)]
    if name == "reduce_scatter":
        return [[math.prod(shape) * len(source.ranks)]], given, dtypes
    return given, others, dtypes


def words_of(record: ring.Record, source: Source) -> str:
    """Return a record in words, such as "all_reduce(SUM) of float32 (3, 4)". Not collective."""
    call = record[3]
    if call is not None:
        return describe(call)
    iteration, bucket = divmod(record[2], BUCKETS)
    return f"bucket {bucket} of backward pass {iteration + 1} of {source.module}"


def _statuses(entries: list[dict[str, Any]], names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return by group the last operation in each state, -1 for none, as torch has it.

    In one pass: a program that makes many groups has as many names as entries.
    """
    last = {name: dict.fromkeys(_STATES.values(), -1) for name in names}
    for entry in entries:
        of_group = last[entry["process_group"][0]]
        for state, status in _STATES.items():
            of_group[status] = max(of_group[status], entry["collective_seq_id"])
            if state == entry["state"]:
                break
    return {
        name: {status: str(number) for status, number in each.items()}
        for name, each in last.items()
    }

"""Write the file of one rank: its facts on the first line, then one event a line."""

from __future__ import annotations

import gzip
import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpiddp import settings
from mpiddp.system import cores, near_memory
from mpiddp.tracing.events import Events
from mpiddp.tracing.merging import COMPRESSION, FIRST_LINE, LAST_LINE, path_of

if TYPE_CHECKING:
    from mpiddp.mpi.nodes import Topology
    from mpiddp.tracing.clocks import Clock
    from mpiddp.tracing.collector import Collector

__all__ = ["write"]


def write(
    folder: Path, topology: Topology, clock: Clock, collector: Collector, unix_time: float
) -> Path:
    """Write this rank's file, whole or not at all; return its path. Not collective.

    Args:
        folder: of the trace.
        topology: where this rank stands.
        clock: that of all ranks.
        collector: what has happened here.
        unix_time: what this rank's calendar clock said when the monotonic one was 0.

    Raises:
        OSError: it cannot be written.
    """
    path = path_of(folder, topology.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    available = cores.available()
    sockets = near_memory.groups_of_cores("socket")
    facts = {
        "rank": topology.rank,
        "host": host,
        "node": topology.node_rank,
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "cores": sorted(available),
        "sockets": sum(not available.isdisjoint(group) for group in sockets),
        "shared_parameters": bool(settings.SHARED_PARAMETERS.read_before_init()),
        "reductions": len(collector.reductions),
        "lost": collector.lost,
        "unfinished": len(collector.unfinished),
        "bucket_tuning": [tuning.facts() for _, tuning in sorted(collector.tunings.items())],
        "clock": {
            "error_us": round(clock.error() * 1e6, 3),
            "aligned_at_end": clock.ended is not None,
            "drift": clock.drift(),
            "began": asdict(clock.began),
            "ended": None if clock.ended is None else asdict(clock.ended),
            "origin": clock.origin,
            "unix_time_at_zero": clock.origin - clock.began.seconds + unix_time,
        },
    }
    events = Events(topology.rank, clock, collector)
    groups = events.groups()
    distributed = {
        "backend": "mpiddp",
        "rank": topology.rank,
        "world_size": topology.world_size,
        "pg_count": len(groups),
        "pg_config": groups,
    }
    part = path.with_name(f".{path.name}.part")
    with gzip.open(part, "wt", COMPRESSION, encoding="utf-8") as out:
        out.write('{"schemaVersion": 1, "displayTimeUnit": "ms", ')
        out.write(f'"distributedInfo": {json.dumps(distributed)}, ')
        out.write(f'"mpiddp": {json.dumps(facts)}, {FIRST_LINE}')
        before = ""
        for event in events.all(host):
            out.write(before + json.dumps(event))
            before = ",\n"
        out.write(f"\n{LAST_LINE}")
    part.replace(path)
    return path

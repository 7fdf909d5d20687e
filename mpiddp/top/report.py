"""What is shown as JSON, for other programs: a line for each look at a host."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from mpiddp.top.jobs import Job, Row
from mpiddp.top.pages import Module
from mpiddp.version import __version__

__all__ = ["as_json"]


def as_json(host: str, jobs: Sequence[Job]) -> str:
    """Return all jobs of a host in one line. Not collective."""
    told = {
        "host": host,
        "time": time.time(),
        "version": __version__,
        "jobs": [_job(job) for job in jobs],
    }
    return json.dumps(told) + "\n"


def _job(job: Job) -> dict[str, Any]:
    return {
        "job": job.name,
        "size": job.size,
        "command": job.command,
        "seconds_without_step": job.still,
        "awaited": job.awaited,
        "ranks": [_rank(row) for row in job.rows],
    }


def _rank(row: Row) -> dict[str, Any]:
    rank, module, doing = row.rank, row.module, row.doing
    compared = None if module is None or not module.compared else module
    return {
        "rank": rank.rank,
        "process": rank.process_id,
        "command": rank.command,
        "version": rank.version,
        "problem": rank.problem or None,
        "state": rank.usage.state,
        "processor_share": row.processor,
        "memory_bytes": rank.usage.memory,
        "steps": row.steps,
        "steps_per_second": row.steps_per_second,
        "last_step_seconds": None if module is None else module.step,
        "waiting_for_gradients_share": row.exposed,
        "waiting_for_last_share": row.waiting,
        "slowest_rank": None if row.slowest < 0 else row.slowest,
        "slowest_in_steps": None if compared is None else compared.late,
        "compared_steps": None if compared is None else compared.compared,
        "operations": row.operations,
        "operations_per_second": row.operations_per_second,
        "now": doing.words,
        "now_seconds": doing.since,
        "in_operation": doing.act is not None,
        "awaited": row.awaited,
        "modules": [] if rank.page is None else [_module(each) for each in rank.page.modules],
    }


def _module(module: Module) -> dict[str, Any]:
    return {
        "name": module.name,
        "steps": module.steps.count,
        "last_step_seconds": module.step,
        "waited_for_gradients_seconds": module.exposed,
    }

"""Elastic training of Horovod, which mpiddp does not have: each name says so when it is used."""

from __future__ import annotations

from typing import Any

__all__ = ["ElasticSampler", "TorchState", "run"]


def _refuse(name: str) -> NotImplementedError:
    return NotImplementedError(  # no ranks come or go yet; Horovod programs import the names
        f"mpiddp has no elastic training yet: hvd.elastic.{name} cannot be used. The ranks of a "
        f"job are those that mpirun started; save checkpoints, and start the job again"
    )


def run(func: Any) -> Any:
    """Raise NotImplementedError. Not collective."""
    raise _refuse("run")


class TorchState:
    """Raises NotImplementedError when made. Not collective."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _refuse("TorchState")


class ElasticSampler:
    """Raises NotImplementedError when made. Not collective."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _refuse("ElasticSampler")

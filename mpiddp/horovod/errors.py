"""The exceptions of Horovod."""

from __future__ import annotations

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]


class HorovodInternalError(RuntimeError):
    """A collective failed, or its ranks did not agree on what it is."""

    __module__ = "mpiddp.horovod"


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job changed. Nothing here raises it."""

    __module__ = "mpiddp.horovod"

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync

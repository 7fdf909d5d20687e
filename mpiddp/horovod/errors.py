"""The exceptions of Horovod."""

from __future__ import annotations

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodInternalError(RuntimeError):
    """A collective failed, or its ranks did not agree on what it is."""

    __module__ = "mpiddp.horovod"


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job changed. Nothing here raises it."""

    __module__ = "mpiddp.horovod"

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """PyTorch is not the one that Horovod was built with. Nothing here raises it."""

    __module__ = "mpiddp.horovod"

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} is {version}, and was {installed_version} at installation")
        self.name = name
        self.version = version
        self.installed_version = installed_version

"""What torch.distributed asks a process group about itself, and about the backend behind it.

torch keeps the two apart, so that a group can have one backend per type of device. A group of
mpiddp is its own backend, for tensors on the CPU and on GPUs.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import NoReturn

import torch

from mpiddp.engine import forks
from mpiddp.mpi.abort import abort_job
from mpiddp.process_group import asked_backend
from mpiddp.process_group.operation_runner import OperationRunner
from mpiddp.torch_internals.compiler import skip_compilation


@skip_compilation
class BackendProperties(OperationRunner):
    """A group that answers torch's questions. Nothing here is collective.

    Collective over `communicator`, and with the arguments of `OperationRunner`.
    """

    # What other backends can do, and torch does by itself, or not at all, for the rest.
    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False
    supports_reconfigure = False
    supports_window = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: tensors are torch's own to allocate."""
        return False

    def getBackendName(self) -> str:
        """Return "mpiddp", or the name that the script has asked for, see asked_backend.py."""
        try:
            caller = sys._getframe(1)
        except ValueError:
            caller = None  # a thread of C++ asks
        named = asked_backend.told(self, caller)
        return "mpiddp" if named is None else asked_backend.asked_name(named)

    @property
    def _device_types(self) -> list[torch.device]:
        """Where tensors of this group may be.

        The CPU is always among them: torch's object collectives go there, and its checkpoints ask
        for it.
        """
        devices = [torch.device("cpu")]
        if torch.cuda.is_available():
            devices.append(torch.device("cuda"))
        return devices

    def _get_backend(self, device: torch.device) -> BackendProperties:  # type: ignore[override]
        """Return this group: it serves tensors on every device."""
        return self

    get_backend = _get_backend

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation that is started from now on may wait for other ranks."""
        self.timeout = timeout

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Do nothing, as torch's Gloo: `set_timeout` and options of a call change limits."""

    def abort(self) -> None:
        """End every rank of the job, as MPI_Abort does."""
        forks.check("abort")
        abort_job(1)

    def get_reconfigure_handle(self) -> str:
        """Raise RuntimeError: the ranks of a group are those of its communicator."""
        raise _unsupported("get_reconfigure_handle")

    def reconfigure(self, opts: object) -> NoReturn:
        """Raise RuntimeError: the ranks of a group are those of its communicator."""
        raise _unsupported("reconfigure")

    def new_window(self, tensor: torch.Tensor | None = None) -> NoReturn:
        """Raise RuntimeError: torch's windows are not served."""
        raise _unsupported("new_window")

    def _get_sequence_number_for_group(self) -> int:
        return self.entered

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: every rank counts its own operations."""


def _unsupported(name: str) -> RuntimeError:
    return RuntimeError(f"Backend mpiddp does not support {name}")

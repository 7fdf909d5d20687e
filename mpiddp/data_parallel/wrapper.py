"""torch.nn.DataParallel whose replicas are MPI ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpiddp.data_parallel import hub, module_state, scattering

__all__ = ["DataParallel"]


class DataParallel(torch.nn.DataParallel[torch.nn.Module]):
    """Divides each batch of rank 0's script among MPI ranks.

    Collective over MPI.COMM_WORLD: every rank constructs the same modules in the same order. Then
    rank 0 goes on with its script, and calls this module with the whole batch; the other ranks call
    `serve`. Under ``python -m mpiddp --data-parallel`` only rank 0 runs the script, nothing is
    collective, and modules are sent to the others.

    Each call cuts the tensors among its arguments along `dim` as `torch.chunk` does, one part a
    rank; what is no tensor goes to each. The replicas have rank 0's parameters and buffers. Outputs
    are joined along `dim` on rank 0. Backward there adds the sum of all replicas' gradients to the
    parameters' ``grad``, and gradients of the inputs flow back. Changes that a replica makes to
    its buffers are lost, except on rank 0, whose replica is the module itself.

    Args:
        module: what computes a part of a batch. It must be able to be pickled under
            ``--data-parallel``, and where its submodules change after the first call.
        device_ids: ignored, for torch's sake: every rank is one replica.
        output_device: where outputs are joined; None: where the first part's output is.
        dim: the dimension along which tensors are cut and joined.

    Attributes:
        module: the module.

    Raises:
        RuntimeError: MPI cannot start, or each process is a world of its own.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        # Not torch's own, which would look for GPUs.
        torch.nn.Module.__init__(self)
        self.module = module
        self.dim = dim
        self.device_ids = []
        self.output_device = output_device  # type: ignore[assignment]
        self._connect()

    def _connect(self) -> None:
        own = hub.get()
        vars(self)["_number"] = own.add(self)
        vars(self)["_known"] = module_state.Known()
        if own.rank != 0:
            from mpiddp.data_parallel import serving

            serving.watch_end(own)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module with a batch. Of rank 0 only; the others serve it.

        Raises:
            RuntimeError: it was called on another rank; or there are more parts than ranks.
            Exception: what the module has raised on any rank, with that rank's traceback.
        """
        own = hub.get()
        if own.size == 1 or own.computing:
            return self.module(*inputs, **kwargs)
        if own.rank != 0:
            raise RuntimeError(
                f"DataParallel was called on rank {own.rank}: only rank 0 calls it, with the whole "
                f"batch. The other ranks call serve()"
            )
        from mpiddp.data_parallel import leader

        with torch.autograd.profiler.record_function("DataParallel.forward"):
            parts, named = self.scatter(inputs, kwargs, range(own.size))
            if not parts and not named:
                parts, named = ((),), ({},)
            if len(parts) > own.size:
                raise RuntimeError(f"scatter() made {len(parts)} parts for {own.size} ranks")
            outputs = leader.of_hub(own).forward(
                vars(self)["_number"], self.module, vars(self)["_known"], parts, named, self._device
            )
            return self.gather(outputs, self.output_device)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> Any:
        """Return the positional and the named arguments of each part. Not collective.

        A subclass may divide a batch in another way.

        Args:
            inputs: the positional arguments of the call.
            kwargs: the named ones.
            device_ids: the ranks.
        """
        return scattering.scatter(inputs, kwargs, len(device_ids), self.dim)

    def gather(self, outputs: Any, output_device: int | torch.device | None) -> Any:
        """Join the outputs of the parts. Not collective. A subclass may do it in another way."""
        device = None if output_device is None or self._device is None else output_device
        if isinstance(device, int):
            device = torch.device("cpu") if device < 0 else torch.device("cuda", device)
        return scattering.gather(outputs, self.dim, device)

    def serve(self) -> bool:
        """Compute for rank 0 until it ends, or has no DataParallel any more.

        Not collective. Serves all DataParallel modules that this rank has constructed. On rank 0
        it returns at once.

        Returns:
            Whether this rank has served: False on rank 0, so ``if model.serve(): sys.exit()``.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; the job then ends.
        """
        own = hub.get()
        if own.rank == 0 or own.size == 1:
            return False
        from mpiddp.data_parallel import serving

        serving.serve(own)
        return True

    def end_serving(self) -> None:
        """Let the other ranks forget this module. Of rank 0; not collective.

        When rank 0 has done so for all its DataParallel modules, `serve` returns on the others. The
        same happens when these modules are garbage-collected, and when rank 0 ends.
        """
        hub.get().close(vars(self)["_number"])

    @property
    def _device(self) -> torch.device | None:
        """The GPU that the module is on; None on the CPU."""
        first = next(self.module.parameters(), None)
        return None if first is None or first.is_cpu else first.device

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        for name in ("_number", "_known"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._connect()

"""Measure the memory of a step with `lazy_bucket_allocation`, beside torch's class.

    mpirun -n 2 python benchmarks/lazy_buckets.py [--json FILE]

Three layers of 67 MB, each of which keeps as much for its backward as its gradient takes, as large
batches do. The figure is the highest proportional set size (PSS, in which shared pages count for a
share each) of a rank in a step, on average over the ranks, and that at the end of a forward; less
the PSS before the model was wrapped, in units of the gradients' size. torch's class has
`lazy_bucket_allocation` since torch 2.15; with older ones it is measured without.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from measuring import describe_machine, table
from mpi4py import MPI
from names import GLOO, OURS

import mpiddp

WIDTH = 4096
LAYERS = 3
STEPS = 4
TorchDDP = torch.nn.parallel.DistributedDataParallel


class Keeping(torch.autograd.Function):
    """The identity, which keeps a large tensor from forward until backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        """Keep as much as the gradient of a layer takes."""
        context.save_for_backward(torch.ones(WIDTH, WIDTH))
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Let go of it."""
        return gradient * context.saved_tensors[0][0, 0]


class Net(torch.nn.Module):
    """Layers with a `Keeping` before each."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Apply all layers."""
        for layer in self.layers:
            value = layer(Keeping.apply(value))
        return value


def own_pss() -> int:
    """Return this process's PSS in bytes. Not collective."""
    with open("/proc/self/smaps_rollup", encoding="utf-8") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("Pss:"))


class Watching:
    """Watches the PSS of this process from a thread. Not collective."""

    def __init__(self) -> None:
        self.highest = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended:
            self.highest = max(self.highest, own_pss())
            time.sleep(0.002)

    def __enter__(self) -> Watching:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()


def mean(value: float) -> float:
    """Return the mean over the ranks. Collective."""
    total: float = MPI.COMM_WORLD.allreduce(value)
    return total / MPI.COMM_WORLD.size


def measure(candidate: str, lazy: bool, views: bool) -> tuple[float, float]:
    """Return the highest memory and that after forward, in units of the gradients. Collective."""
    model = Net()
    inputs = torch.randn(8, WIDTH, requires_grad=True)
    size = sum(4 * parameter.numel() for parameter in model.parameters())
    gc.collect()
    MPI.COMM_WORLD.Barrier()
    before = own_pss()
    settings: dict[str, Any] = {"gradient_as_bucket_view": views}
    if lazy:
        settings["lazy_bucket_allocation"] = True
    if candidate == OURS:
        wrapped = mpiddp.DistributedDataParallel(model, **settings)
    else:
        wrapped = TorchDDP(model, process_group=dist.new_group(backend="gloo"), **settings)
    for _ in range(STEPS):
        wrapped.zero_grad()
        with Watching() as watching:
            output = wrapped(inputs).square().mean()
            MPI.COMM_WORLD.Barrier()
            forward = own_pss()
            MPI.COMM_WORLD.Barrier()
            output.backward()
        del output
    return mean(watching.highest - before) / size, mean(forward - before) / size


def main() -> None:
    """Measure one candidate after the other and print a table on rank 0. Collective."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures, machine and versions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mpiddp.init_process_group()
    known = "lazy_bucket_allocation" in inspect.signature(TorchDDP).parameters
    records = []
    measure(OURS, False, True)  # torch imports modules for the first one
    for views in (False, True):
        for candidate in (OURS, GLOO):
            for lazy in (False, True):
                if lazy and candidate == GLOO and not known:
                    continue
                highest, forward = measure(candidate, lazy, views)
                records.append(
                    {
                        "candidate": candidate,
                        "lazy": lazy,
                        "views": views,
                        "ranks": dist.get_world_size(),
                        "highest": highest,
                        "forward": forward,
                    }
                )
    if dist.get_rank() == 0:
        rows = [["", "lazy", "views", "highest in a step", "after forward"]]
        for each in records:
            switches = ["on" if each[name] else "off" for name in ("lazy", "views")]
            figures = [f"{each[name]:.2f}" for name in ("highest", "forward")]
            rows.append([str(each["candidate"]), *switches, *figures])
        print(table(rows), flush=True)
        if args.json:
            machine = describe_machine(MPI.Get_library_version())
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump({"machine": machine, "lazy": records}, file, indent=1)
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

"""Measure how long it takes to construct a 500 MB model, and to initialise the process group.

    mpirun -n 2 python benchmarks/construction.py [--json FILE]

Beside torch's class over Gloo under the same mpirun. Both groups are made and destroyed in each
round, in turn, with MPI initialised already; how long MPI_Init_thread took is said as well,
because a job without MPI does not need it. Gloo's rendezvous is a TCPStore on rank 0. The time is
that of the slowest rank after a barrier.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import mpi4py

mpi4py.rc.initialize = False

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from measuring import describe_machine, quartiles, ratio, show_ratio, table  # noqa: E402
from mpi4py import MPI  # noqa: E402
from names import GLOO, OURS  # noqa: E402
from workloads import linears  # noqa: E402

import mpiddp  # noqa: E402

LAYERS, WIDTH = 30, 2048  # 504 MB


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds on the slowest rank, and the result. Collective."""
    MPI.COMM_WORLD.Barrier()
    began = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - began
    return float(MPI.COMM_WORLD.allreduce(seconds, MPI.MAX)), result


def start_gloo() -> None:
    """Initialise torch.distributed over Gloo, as under torchrun. Collective."""
    dist.init_process_group("gloo", rank=MPI.COMM_WORLD.rank, world_size=MPI.COMM_WORLD.size)


def choose_address() -> None:
    """Let all ranks know where rank 0 listens. Collective."""
    port = 0
    if MPI.COMM_WORLD.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(MPI.COMM_WORLD.bcast(port))


def measure_groups(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of init_process_group in each round. Collective."""
    seconds: dict[str, list[float]] = {OURS: [], GLOO: []}
    for _ in range(rounds):
        taken, _ = timed(mpiddp.init_process_group)
        seconds[OURS].append(taken)
        mpiddp.destroy_process_group()
        choose_address()
        taken, _ = timed(start_gloo)
        seconds[GLOO].append(taken)
        dist.destroy_process_group()
    return seconds


def measure_models(rounds: int, views: bool) -> dict[str, list[float]]:
    """Return the seconds of the constructor of DDP in each round. Collective."""
    gloo = dist.new_group(backend="gloo")
    torch_class = torch.nn.parallel.DistributedDataParallel
    module = linears(LAYERS, WIDTH)
    makers: dict[str, Callable[[], Any]] = {
        OURS: lambda: mpiddp.DistributedDataParallel(module, gradient_as_bucket_view=views),
        GLOO: lambda: torch_class(module, process_group=gloo, gradient_as_bucket_view=views),
    }
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    for number in range(rounds + 1):
        for name, make in makers.items():
            taken, made = timed(make)
            if number:  # the first is for the memory of module and MPI
                seconds[name].append(taken)
            del made
            gc.collect()
    return seconds


def main() -> None:
    """Measure and print a table on rank 0. Collective."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="write samples, machine and versions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    mpi_init = time.perf_counter() - began
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    measured = {"init_process_group": measure_groups(args.rounds)}
    mpiddp.init_process_group()
    for views in (True, False):
        name = f"500 MB model, views {'on' if views else 'off'}"
        measured[name] = measure_models(args.rounds, views)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        rows = [[f"construction, {ranks} ranks, ms", OURS, GLOO, "mpiddp / Gloo (90 %)"]]
        for name, seconds in measured.items():
            middles = [f"{1e3 * quartiles(seconds[each])[1]:.1f}" for each in (OURS, GLOO)]
            rows.append([name, *middles, show_ratio(ratio(seconds[OURS], seconds[GLOO]))])
        print(
            table(rows), f"MPI_Init_thread took {1e3 * mpi_init:.0f} ms", "", sep="\n", flush=True
        )
        if args.json:
            machine = describe_machine(MPI.Get_library_version())
            result = {"ranks": ranks, "mpi_init": mpi_init, "seconds": measured}
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump({"machine": machine, "construction": [result]}, file, indent=1)
    mpiddp.destroy_process_group()
    MPI.Finalize()


if __name__ == "__main__":
    main()

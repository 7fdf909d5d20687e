"""Starts two processes of its own by multiprocessing, as a script does that knows no launcher.

python starts_processes.py METHOD (world | own | logger) [PORT]

world: they are torch's ranks, at PORT, else at the MASTER_PORT that is there. own: each is a world
of its own, at a free port, as inference servers have them. logger: they begin no world. Each prints
a line of JSON. With a folder in STARTS_PROCESSES each stays until those of two ranks have come.
"""

import json
import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def come(name: str) -> None:
    if "STARTS_PROCESSES" in os.environ:
        Path(os.environ["STARTS_PROCESSES"], name).touch()


def stay() -> None:
    if "STARTS_PROCESSES" in os.environ:
        while len(os.listdir(os.environ["STARTS_PROCESSES"])) < 4:
            time.sleep(0.05)


def work(index: int, what: str, started_by: str, port: str) -> None:
    said = {"case": what, "started by": started_by, "index": index}
    if what != "logger":
        method, size, rank = None, 2, index
        if port:
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", port
        if what == "own":
            method = f"tcp://127.0.0.1:{port}"
        come(f"{started_by}-{index}")
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
        total = torch.ones(1)
        dist.all_reduce(total)
        said |= {"total": total.item(), "backend": dist.get_backend()}
        stay()
        dist.destroy_process_group()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    kind, what, port = (*sys.argv[1:], "")[:3]
    context = multiprocessing.get_context(kind)
    if what == "own":
        port = str(free_port())
    mine = os.environ["RANK"]
    both = [context.Process(target=work, args=(index, what, mine, port)) for index in (0, 1)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    if what != "world":
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
    sys.exit(int(any(each.exitcode for each in both)))

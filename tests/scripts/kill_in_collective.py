"""One rank is killed while all repeat a collective of many rounds.

    mpirun [--with-ft ulfm] -n 3 python kill_in_collective.py NAME SECONDS FOLDER

Rank 1 is killed so long after the first call, and notes the time in the FOLDER before. If the
others live on, they do the same once more in the next world, and say how long after.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import mpiddp
from mpiddp import elastic

if "TWO_TO_A_NODE" in os.environ:
    import two_to_a_node  # noqa: F401  # the ranks are as on several nodes

NAME, SECONDS, FOLDER = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])


def call_of(name: str) -> Callable[[], object]:
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    large, parts = torch.ones(1_000_000), [torch.ones(300_000 + to) for to in ranks]
    whole = torch.ones(len(ranks) * large.numel())
    received = [torch.empty_like(large) for _ in ranks]
    at_root = received if rank == 1 else None
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(large, dist.ReduceOp.AVG),
        "all_reduce, asynchronous": lambda: dist.all_reduce(large, async_op=True).wait(),
        "largest": lambda: dist.all_reduce(large, dist.ReduceOp.MAX),
        "reduce": lambda: dist.reduce(large, 1),
        "broadcast": lambda: dist.broadcast(large, 1),
        "all_gather": lambda: dist.all_gather(received, large),
        "reduce_scatter": lambda: dist.reduce_scatter_single(large, whole),
        "all_to_all_single": lambda: dist.all_to_all_single(whole.clone(), whole),
        "all_to_all": lambda: dist.all_to_all([parts[rank].clone() for _ in ranks], parts),
        "gather": lambda: dist.gather(large, at_root, 1),
        "scatter": lambda: dist.scatter(large, at_root, 1),
        "small all_reduce": lambda: dist.all_reduce(torch.ones(2)),
        "barrier": dist.barrier,
    }
    return calls[name]


def kill() -> None:
    time.sleep(SECONDS)
    (FOLDER / "began").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


@elastic.run
def train(state: elastic.State) -> None:
    call = call_of(NAME)
    call()
    if dist.get_world_size() < started:
        return
    if dist.get_rank() == 1:
        threading.Thread(target=kill, daemon=True).start()
    while True:
        call()
        dist.barrier()  # the root of a broadcast would go on


torch.set_num_threads(1)
mpiddp.init_process_group()
start, started = dist.get_rank(), dist.get_world_size()
train(elastic.State())
after = time.monotonic() - float((FOLDER / "began").read_text())
print(json.dumps({"rank": start, "after": after}) + "\n", end="", flush=True)

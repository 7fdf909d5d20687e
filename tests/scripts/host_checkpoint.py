"""Save and load in a folder: `host_checkpoint.py FOLDER DO...`, with save:STEP, shards:STEP, load.

Each rank prints a JSON line for each of them: its host, and what was found, or the error.
"""

import json
import os
import socket
import sys
import warnings

import torch
import torch.distributed as dist

import mpiddp
from mpiddp import checkpoint

warnings.simplefilter("always")
mpiddp.init_process_group()


def state(sharded: bool) -> "dict[str, torch.Tensor]":
    if not sharded:
        return {"weight": torch.ones(3)}
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"weight": distribute_tensor(torch.ones(8), mesh, [Shard(0)])}


def do(what: str) -> object:
    name, _, step = what.partition(":")
    if name == "load":
        found = checkpoint.load(sys.argv[1], into=state(True))
        return found and found.step
    return str(checkpoint.save(state(name == "shards"), sys.argv[1], step=int(step)))


for what in sys.argv[2:]:
    told: "dict[str, object]" = {"rank": dist.get_rank(), "host": socket.gethostname()}
    with warnings.catch_warnings(record=True) as caught:
        try:
            told["result"] = do(what)
        except Exception as error:
            told["error"] = f"{type(error).__name__}: {error}"
    told["warned"] = [str(each.message) for each in caught]
    dist.barrier()
    told["files"] = sorted(os.listdir(sys.argv[1])) if os.path.isdir(sys.argv[1]) else None
    print(json.dumps(told), flush=True)
mpiddp.destroy_process_group()

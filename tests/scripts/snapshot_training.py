"""Train with snapshots in node memory, and go on from the newest one that is found.

    python snapshot_training.py replicated|sharded NAME STEPS [--under-way FOLDER]

What a step does depends on its number alone. With --under-way each rank makes a file there, named
for itself, when snapshots have been made; with STEPS 0 it only looks. Each rank prints JSON: the
step it began with, the one it ended with, and the bits of the parameters.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import mpiddp
from mpiddp import checkpoint

ENOUGH = 40

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["replicated", "sharded"])
parser.add_argument("name")
parser.add_argument("steps", type=int)
parser.add_argument("--under-way", type=Path)
arguments = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
mpiddp.init_process_group()
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
if arguments.kind == "sharded":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
else:
    wrapped = mpiddp.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
snapshots = checkpoint.Snapshots(arguments.name, share=0.5)


def state():
    return {"model": model.state_dict()}


def bits():
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().numpy().tobytes())
    return digest.hexdigest()


found = snapshots.load(**({"into": state()} if arguments.kind == "sharded" else {}))
first = 0
if found is not None:
    model.load_state_dict(found.state["model"])
    first = found.step
for step in range(first, arguments.steps):
    torch.manual_seed(1000 * step + dist.get_rank())
    optimizer.zero_grad()
    wrapped(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()
    snapshots.step(state, step + 1)
    time.sleep(0.01)
    if arguments.under_way and step + 1 == ENOUGH:
        (arguments.under_way / str(dist.get_rank())).touch()
last = max(first, arguments.steps)
said = {"rank": dist.get_rank(), "first": first, "last": last, "bits": bits()}
print(json.dumps(said), flush=True)
snapshots.wait()
mpiddp.destroy_process_group()

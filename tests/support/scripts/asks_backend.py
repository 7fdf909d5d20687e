"""Ask torch.distributed for the backend's name in all ways, as programs do before they wrap."""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed import get_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def answers(group):
    asked = dist.group.WORLD if group is None else group
    return [
        get_backend(group), dist.get_backend_config(group), asked.name(), asked._get_backend_name(),
    ]  # fmt: skip


for named in sys.argv[1:]:
    dist.init_process_group(None if named == "none" else named)
    ranks = list(range(dist.get_world_size()))
    groups = {
        "world": None,
        "the world": dist.group.WORLD,
        "mesh": init_device_mesh("cpu", (len(ranks),)).get_group(),
        "mesh of two": init_device_mesh("cpu", (1, len(ranks))).get_group(1),
        "like the world": dist.new_group(backend=dist.get_backend()),
        "of all": dist.new_group(),
        "of some": dist.new_group(ranks[:-1] if dist.get_rank() < len(ranks) - 1 else ranks[-1:],
                                  use_local_synchronization=True),
        "gloo": dist.new_group(backend="gloo"),
    }  # fmt: skip
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(4, 1)
    if dist.get_backend().split(":")[-1] in ("nccl", "gloo", "mpi", "undefined"):
        model = DistributedDataParallel(model)
    model(torch.ones(2, 4) * dist.get_rank()).sum().backward()
    gathered = [None for _ in ranks]
    dist.all_gather_object(gathered, dist.get_backend())
    said = {
        "rank": dist.get_rank(),
        "named": named,
        "answers": {name: answers(group) for name, group in groups.items()},
        "gathered": gathered,
        "gradient": model.get_parameter(
            "module.weight" if hasattr(model, "module") else "weight"
        ).grad.tolist(),
    }
    if "mpiddp" in sys.modules:
        import mpiddp

        said["true"] = {name: mpiddp.get_backend(group) for name, group in groups.items()}
    print(json.dumps(said), flush=True)
    dist.destroy_process_group()

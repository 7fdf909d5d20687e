"""Libraries that ask for the backend's name before they do anything: nothing in it knows of MPI.

torchrun --nproc-per-node 2 asking_libraries.py FOLDER ignite monai

Each rank prints a line of JSON for each.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn


def train(model, optimizer, rank):
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 1.0 + rank)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ignite(_local_rank):
    """`auto_model` wraps for the backends that it knows."""
    import ignite.distributed as idist

    torch.manual_seed(idist.get_rank())
    model = idist.auto_model(nn.Linear(4, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    said = {
        "model": idist.model_name(),
        "backend": idist.backend(),
        "wrapper": type(model).__module__,
        "losses": train(model, optimizer, idist.get_rank()),
        "sum": idist.all_reduce(sum(p.detach().sum().item() for p in model.parameters())),
    }
    say("ignite", said)


def monai():
    """`get_dist_device` knows Gloo's and NCCL's; where it answers None, gathering fails."""
    from monai.utils.dist import (
        evenly_divisible_all_gather,
        get_dist_device,
        string_list_all_gather,
    )

    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    said = {
        "backend": dist.get_backend(),
        "wrapper": type(model).__module__,
        "device": str(get_dist_device()),
        "losses": train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank),
        "gathered": evenly_divisible_all_gather(torch.ones(rank + 1) * rank).tolist(),
        "words": string_list_all_gather(["a", "bc"][: rank + 1]),
    }
    say("monai", said)


def say(case, said):
    one = {"case": case, "rank": dist.get_rank(), "world": dist.get_world_size(), **said}
    print(json.dumps(one), flush=True)


if __name__ == "__main__":
    if "ignite" in sys.argv:
        from ignite.distributed import Parallel

        with Parallel(backend="gloo") as parallel:
            parallel.run(ignite)
    if "monai" in sys.argv:
        dist.init_process_group("gloo")
        monai()
        dist.destroy_process_group()

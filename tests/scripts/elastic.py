"""Start the ranks by torchelastic's Python interface, and collect what they return.

python elastic.py RANKS
"""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def train(seed):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(seed)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 1))
    torch.manual_seed(seed + rank)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(5, 6)).square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    dist.destroy_process_group()
    return {"rank": rank, "losses": losses, "sum": total}


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(sys.argv[1]),
        run_id="none",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    returned = elastic_launch(config, train)(11)
    assert [returned[rank]["rank"] for rank in sorted(returned)] == sorted(returned)
    # Under torchelastic one parent has them all; under MPI each rank has.
    rank = int(__import__("os").environ.get("RANK", "0"))
    if rank == 0:
        for rank in sorted(returned):
            print(json.dumps(returned[rank]), flush=True)

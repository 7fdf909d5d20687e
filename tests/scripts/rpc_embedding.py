"""Train a dense model by DDP beside an embedding on one worker, by torch's RPC.

    torchrun --nproc-per-node 2 rpc_embedding.py

Written for torchrun and Gloo. Each rank prints a line of JSON: its losses, and a sum of parameters.
"""

import json
import os
import warnings

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel as DDP

warnings.simplefilter("ignore")
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Table:
    """An embedding on worker0, one for each trainer."""

    def __init__(self):
        # Not the process's generator: a thread of RPC runs this while worker0 makes its model.
        weight = torch.randn(20, 8, generator=torch.Generator().manual_seed(3))
        self.embedding = nn.EmbeddingBag.from_pretrained(weight, freeze=False)

    def look_up(self, words):
        return self.embedding(words)

    def parameters(self):
        return [rpc.RRef(parameter) for parameter in self.embedding.parameters()]

    def sum(self):
        return self.embedding.weight.sum().item()


def main():
    from torch.distributed.optim import DistributedOptimizer

    dist.init_process_group("gloo")
    rpc.init_rpc(f"worker{RANK}", rank=RANK, world_size=WORLD_SIZE)
    table = rpc.remote("worker0", Table)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    torch.manual_seed(10 + RANK)
    parameters = [*table.rpc_sync().parameters(), *map(rpc.RRef, model.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    losses = []
    for _ in range(5):
        words = torch.randint(20, (4, 6))
        with dist_autograd.context() as context:
            loss = (model(table.rpc_sync().look_up(words)) - 1).square().mean()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    total = sum(parameter.sum().item() for parameter in model.parameters())
    said = {"rank": RANK, "losses": losses, "dense": total, "table": table.rpc_sync().sum()}
    print(json.dumps(said), flush=True)
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Start the ranks with mp.spawn, as the example in torch's design note of DDP does.

python spawn_note.py WORLD_SIZE PORT
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP


def example(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(7)
    model = nn.Linear(10, 10)
    ddp_model = DDP(model)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.1)
    torch.manual_seed(20 + rank)
    losses = []
    for _ in range(4):
        outputs = ddp_model(torch.randn(20, 10))
        loss = loss_fn(outputs, torch.randn(20, 10))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(json.dumps({"rank": rank, "losses": losses, "sum": total}), flush=True)
    # Gloo may abort a process whose peer has ended.
    dist.barrier()
    dist.destroy_process_group()


def main():
    world_size = int(sys.argv[1])
    mp.spawn(example, args=(world_size,), nprocs=world_size, join=True)


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = sys.argv[2]
    main()

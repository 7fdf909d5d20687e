"""Train as the examples of Horovod do: each rank a part of the batch, metrics averaged.

    horovodrun -np 2 python horovod_trainer.py

The whole batch is the same with any number of ranks. Each rank prints a line of JSON.
"""

import json

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(hvd.rank())  # broadcast_parameters makes them equal
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
if hvd.rank() == 0:
    torch.manual_seed(1)
    for layer in (model[0], model[2]):
        layer.reset_parameters()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * (1 + hvd.rank()), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)

generator = torch.Generator().manual_seed(2)
losses = []
for step in range(6):
    points = torch.randn(24, 6, generator=generator)
    targets = points[:, :3].argmax(1)
    own = slice(hvd.rank(), None, hvd.size())
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(points[own]), targets[own])
    loss.backward()
    if step % 2:
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        optimizer.step()
    scheduler.step()
    losses.append(hvd.allreduce(loss.detach(), name="loss").item())

names = hvd.allgather_object(f"rank {hvd.rank()}")
assert names == [f"rank {rank}" for rank in range(hvd.size())]
total = sum(parameter.sum().item() for parameter in model.parameters())
print(json.dumps({"rank": hvd.rank(), "losses": losses, "sum": total}), flush=True)
hvd.shutdown()

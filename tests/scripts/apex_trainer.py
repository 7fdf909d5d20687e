"""Train with Apex's DistributedDataParallel and SyncBatchNorm, as scripts of 2019 do.

Prints, on each rank, the losses and the sum of the parameters.
"""

import json

import torch
import torch.distributed as dist
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import convert_syncbn_model

dist.init_process_group(backend="nccl", init_method="env://")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = torch.nn.Sequential(
    torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten(),
    torch.nn.Linear(48, 4),
)  # fmt: skip
torch.manual_seed(99)
start = [torch.randn_like(parameter) * 0.1 for parameter in model.parameters()]
images, targets = torch.randn(12, 2, 6, 6), torch.randint(0, 4, (12,))
if rank == 0:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.copy_(value)
model = DDP(convert_syncbn_model(model), delay_allreduce=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
losses = []
for _ in range(3):
    output = model(images[rank::world_size])
    loss = torch.nn.functional.cross_entropy(output, targets[rank::world_size])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / world_size)
total = sum(parameter.double().sum().item() for parameter in model.parameters())
print(json.dumps({"rank": rank, "losses": losses, "sum": total}), flush=True)
dist.destroy_process_group()

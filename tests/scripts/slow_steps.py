"""Train with a planted fault, named by the first argument, that a report of the trace must name.

- slow_rank: rank 1 sleeps between forward and backward, from the 6th step on;
- slow_loader: each rank's data come slowly;
- slow_loader_of_one: only those of rank 1;
- one_bucket: all gradients are in one;
- none.
"""

import sys
import time

import torch
import torch.distributed as dist

import mpiddp

FAULT = sys.argv[1]
STEPS = 16
NAP = 0.15

mpiddp.init_process_group()
rank = dist.get_rank()
torch.manual_seed(1)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        if FAULT == "slow_loader" or (FAULT == "slow_loader_of_one" and rank == 1):
            time.sleep(NAP)
        return torch.randn(512)


model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
size = 100 if FAULT == "one_bucket" else 1
model = mpiddp.DistributedDataParallel(model, bucket_cap_mb=size)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step, batch in enumerate(torch.utils.data.DataLoader(Data(), batch_size=1), 1):
    output = model(batch)
    if FAULT == "slow_rank" and rank == 1 and step >= 6:
        time.sleep(NAP)
    output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
mpiddp.destroy_process_group()

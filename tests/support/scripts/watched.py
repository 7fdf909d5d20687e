"""A job that others watch from outside: watched.py WORD FOLDER KIND [STEPS].

KIND says what it does: "train", "torch" (torch's own DDP), "horovod" or "collectives". The last
rank takes 30 ms longer for a step than the others. After so many STEPS it sleeps for ever. The job
ends when FOLDER/stop is there. Each rank says how often it was continued after a stop.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import mpiddp

word, folder, kind = sys.argv[1:4]
most = int(sys.argv[4]) if len(sys.argv) > 4 else -1
continued = []
signal.signal(signal.SIGCONT, lambda number, frame: continued.append(number))

if kind == "horovod":
    import mpiddp.horovod as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
else:
    dist.init_process_group("mpiddp")
    rank, size = dist.get_rank(), dist.get_world_size()

module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), 1e-3)
model: torch.nn.Module = module
if kind == "train":
    model = mpiddp.DistributedDataParallel(module)
elif kind == "torch":
    model = torch.nn.parallel.DistributedDataParallel(module)
elif kind == "horovod":
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=module.named_parameters())


def all_stop() -> bool:
    """Whether rank 0 has seen the file. Collective."""
    told = torch.tensor([float(rank == 0 and os.path.exists(f"{folder}/stop"))])
    if kind == "horovod":
        return bool(hvd.allreduce(told, op=hvd.Sum) > 0)
    dist.all_reduce(told)
    return bool(told > 0)


step = 0
while not all_stop():
    if size > 1 and rank == size - 1:
        if step == most:
            time.sleep(1000)
        time.sleep(0.03)
    step += 1
    if kind == "collectives":
        dist.all_reduce(torch.ones(3))
        continue
    optimizer.zero_grad()
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()

with open(f"{folder}/continued-{rank}", "w") as file:
    file.write(str(len(continued)))
if kind == "horovod":
    hvd.shutdown()
else:
    dist.destroy_process_group()

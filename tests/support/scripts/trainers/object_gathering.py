"""The file of a detection library that gathers objects, for Gloo and NCCL only.

torchrun --nproc-per-node 2 object_gathering.py FOLDER NAME FILE

YOLOX's yolox/utils/dist.py and fast-reid's fastreid/utils/comm.py, which is detectron2's: each asks
for the backend's name and stops at one that it does not know. FILE is loaded alone: the packages
around it need GPUs.
"""

import importlib.util
import sys

import numpy
import torch
import torch.distributed as dist
from reporting import Report
from torch import nn

_, _, name, file = sys.argv
spec = importlib.util.spec_from_file_location("gathering", file)
gathering = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gathering)

dist.init_process_group("gloo")
gathering._LOCAL_PROCESS_GROUP = dist.new_group(list(range(dist.get_world_size())))
rank = gathering.get_rank()
report = Report(name)
torch.manual_seed(rank)
numpy.random.seed(rank)  # noqa: NPY002  # what the file draws from
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    report.step(loss.item())
said = {
    "all": gathering.all_gather({"rank": rank, "words": "x" * 10 ** (rank + 3)}),
    "one": gathering.gather(["a", rank]),
    "local": [gathering.get_local_rank(), gathering.get_local_size()],
    "of a group": gathering.all_gather(rank, gathering._LOCAL_PROCESS_GROUP),
    "seed": int(gathering.shared_random_seed()),
}
gathering.synchronize()
report.say(model, **said)
dist.destroy_process_group()

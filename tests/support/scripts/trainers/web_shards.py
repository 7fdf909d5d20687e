"""WebDataset: tar files that ranks and the workers of their loaders divide among themselves.

torchrun --nproc-per-node 2 web_shards.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import webdataset
from reporting import Report
from torch import nn

dist.init_process_group("gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = Path(sys.argv[1])
if rank == 0:
    generator = torch.Generator().manual_seed(0)
    for shard in range(8):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for row in range(40):
                points = torch.randn(16, generator=generator)
                named = {"__key__": f"{shard}-{row}", "x.pth": points, "y.cls": shard % 4}
                writer.write(named)
dist.barrier()
data = (
    webdataset.WebDataset(
        str(folder / "{0..7}.tar"), nodesplitter=webdataset.split_by_node, shardshuffle=False
    )
    .decode()
    .to_tuple("x.pth", "y.cls")
    .batched(10)
)
loader = webdataset.WebLoader(data, batch_size=None, num_workers=1).with_epoch(16)
torch.manual_seed(rank)
model = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 4))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
report = Report("WebDataset")
for _ in range(2):
    for points, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(points), torch.as_tensor(labels))
        loss.backward()
        optimizer.step()
        report.step(loss.item())
report.say(model)
dist.destroy_process_group()

"""PyTorch Geometric as its distributed examples: batches of graphs, a sampler of parts, GIN.

torchrun --nproc-per-node 2 graph_batches.py
"""

import os

import torch
import torch.distributed as dist
from reporting import Report
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool


class Gin(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = torch.nn.ModuleList()
        for size in (8, 32, 32):
            inner = Sequential(Linear(size, 64), BatchNorm1d(64), ReLU(), Linear(64, 32), ReLU())
            self.convolutions.append(GINConv(inner))
        self.last = Linear(32, 2)

    def forward(self, data):
        x = data.x
        for convolution in self.convolutions:
            x = convolution(x, data.edge_index)
        return self.last(global_add_pool(x, data.batch))


dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
generator = torch.Generator().manual_seed(0)
graphs = []
for number in range(128):
    nodes = 5 + number % 7  # so batches differ in size between ranks
    graphs.append(
        Data(
            x=torch.randn(nodes, 8, generator=generator),
            edge_index=torch.randint(0, nodes, (2, 3 * nodes), generator=generator),
            y=torch.tensor([number % 2]),
        )
    )
torch.manual_seed(rank)
model = Gin()
ddp = DistributedDataParallel(model)
optimizer = torch.optim.Adam(ddp.parameters(), lr=5e-3)
sampler = DistributedSampler(graphs, seed=1)
report = Report("PyG")
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in DataLoader(graphs, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(batch), batch.y)
        loss.backward()
        optimizer.step()
        report.step(loss.item())
sums = sum(p.detach().double().sum().item() for p in model.parameters())
report.say(ddp, sums=sums)
dist.destroy_process_group()

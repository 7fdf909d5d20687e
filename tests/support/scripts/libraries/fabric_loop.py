"""A training loop with Lightning Fabric, as for torchrun: nothing in it knows of MPI.

torchrun --nproc-per-node 2 fabric_loop.py FOLDER

Each rank prints a line of JSON. The folder is shared.
"""

import json
import os
import sys

import torch
from lightning_fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(folder, precision):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision=precision)
    fabric.launch()
    seed_everything(1, verbose=False)
    net = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(net, optimizer)
    points = torch.rand(64, 20, generator=torch.Generator().manual_seed(5))
    dataset = TensorDataset(points, points.sum(1, keepdim=True))
    loader = fabric.setup_dataloaders(DataLoader(dataset, 8, shuffle=True))

    def epoch(number):
        loader.sampler.set_epoch(number)
        for index, (points, targets) in enumerate(loader):
            last = index % 2 == 1
            with fabric.no_backward_sync(model, enabled=not last):
                loss = nn.functional.mse_loss(model(points), targets)
                fabric.backward(loss / 2)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())

    losses = []
    path = os.path.join(folder, f"{precision}.ckpt")
    epoch(0)
    fabric.save(path, {"model": model, "optimizer": optimizer, "losses": losses})
    epoch(1)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    epoch(1)
    fabric.barrier()
    return {
        "case": precision,
        "rank": fabric.global_rank,
        "world": fabric.world_size,
        "backend": torch.distributed.get_backend(),
        "wrapper": type(model._forward_module).__module__,
        "environment": type(fabric.strategy.cluster_environment).__name__,
        "losses": losses,
        "gathered": fabric.all_gather(torch.tensor([fabric.global_rank])).tolist(),
        "told": fabric.broadcast({"from": fabric.global_rank}),
        "sum": sum(p.detach().double().abs().sum().item() for p in model.parameters()),
    }


if __name__ == "__main__":
    for precision in ("32-true", "bf16-mixed"):
        print(json.dumps(train(sys.argv[1], precision)), flush=True)

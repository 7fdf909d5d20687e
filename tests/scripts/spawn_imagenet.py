"""One process a device, several nodes, an address in a URL: how classic training scripts start.

python spawn_imagenet.py --dist-url tcp://127.0.0.1:PORT --world-size 1 --rank 0 --devices 2
"""

import argparse
import json

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--world-size", default=-1, type=int, help="number of nodes")
parser.add_argument("--rank", default=-1, type=int, help="number of this node")
parser.add_argument("--dist-url", default="tcp://127.0.0.1:23456")
parser.add_argument("--dist-backend", default="gloo")
parser.add_argument("--devices", default=2, type=int, help="instead of counting GPUs")
parser.add_argument("--times", default=1, type=int, help="how often to train")


def main():
    args = parser.parse_args()
    args.distributed = args.world_size > 1 or args.devices > 1
    devices_per_node = args.devices
    args.world_size = devices_per_node * args.world_size
    for _ in range(args.times):
        mp.spawn(main_worker, nprocs=devices_per_node, args=(devices_per_node, args))


def main_worker(device, devices_per_node, args):
    args.device = device
    if args.distributed:
        args.rank = args.rank * devices_per_node + device
        dist.init_process_group(
            backend=args.dist_backend,
            init_method=args.dist_url,
            world_size=args.world_size,
            rank=args.rank,
        )
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    )
    model = nn.parallel.DistributedDataParallel(model)
    data = TensorDataset(torch.randn(24, 1, 8, 8), torch.randint(0, 5, (24,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, target in loader:
            loss = nn.functional.cross_entropy(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(json.dumps({"rank": args.rank, "losses": losses, "sum": total}), flush=True)
    if args.times > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

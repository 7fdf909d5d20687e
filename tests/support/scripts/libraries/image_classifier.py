"""Training an image classifier as the ImageNet example of pytorch/examples does, on random images.

torchrun --nproc-per-node 2 image_classifier.py FOLDER

The script finds its rank in torchrun's variables, hands it to init_process_group, averages its
figures by all-reduce and writes the best and the last checkpoint; nothing in it knows of MPI.
Each rank prints a line of JSON. The folder is shared.
"""

import argparse
import json
import os
import shutil

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x):
        inner = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(inner)))


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), Block(8), Block(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip


def images(size, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (size,), generator=generator)
    pixels = torch.rand(size, 3, 16, 16, generator=generator) + labels.view(-1, 1, 1, 1) / 10
    return TensorDataset(pixels, labels)


class Mean:
    """The mean of a figure, weighted by how many images it is of."""

    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, value, count):
        self.sum += value * count
        self.count += count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()

    @property
    def value(self):
        return self.sum / self.count


def validate(model, loader, dataset, batch_size):
    right, loss = Mean(), Mean()

    def run(batches):
        for pixels, labels in batches:
            scores = model(pixels)
            right.update((scores.argmax(1) == labels).float().mean().item(), len(labels))
            loss.update(nn.functional.cross_entropy(scores, labels).item(), len(labels))

    model.eval()
    with torch.no_grad():
        run(loader)
        right.all_reduce()
        loss.all_reduce()
        done = len(loader.sampler) * dist.get_world_size()
        if done < len(dataset):  # the sampler drops what does not divide by the ranks
            rest = Subset(dataset, range(done, len(dataset)))
            run(DataLoader(rest, batch_size, num_workers=1))
    model.train()
    return right.value, loss.value


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--dist-url", default="env://")
    parser.add_argument("--dist-backend", default="gloo")
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend=args.dist_backend, init_method=args.dist_url, world_size=world, rank=rank
    )
    batch_size = args.batch_size // world
    torch.manual_seed(1 + rank)  # the wrapper makes the ranks equal
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    training, validation = images(96, 5), images(25, 6)
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size, sampler=sampler, num_workers=1)
    validation_sampler = DistributedSampler(validation, shuffle=False, drop_last=True)
    validation_loader = DataLoader(validation, batch_size, sampler=validation_sampler)

    last, best = (os.path.join(args.folder, name) for name in ("last.pt", "best.pt"))

    def epoch(number):
        nonlocal best_right
        sampler.set_epoch(number)
        for pixels, labels in loader:
            loss = nn.functional.cross_entropy(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        figures = validate(model, validation_loader, validation, batch_size)
        scheduler.step()
        validated.append(figures)
        is_best, best_right = figures[0] > best_right, max(figures[0], best_right)
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"epoch": number + 1, "scheduler": scheduler.state_dict()}, last)
            if is_best:
                shutil.copyfile(last, best)

    losses, validated, best_right = [], [], -1.0
    for number in range(args.epochs):
        epoch(number)
    dist.barrier()
    checkpoint = torch.load(last, map_location="cpu", weights_only=True)
    for name, part in {"model": model, "optimizer": optimizer, "scheduler": scheduler}.items():
        part.load_state_dict(checkpoint[name])
    dist.barrier()
    epoch(checkpoint["epoch"])
    dist.barrier()
    print(json.dumps({
        "case": "images",
        "rank": rank,
        "world": dist.get_world_size(),
        "backend": dist.get_backend(),
        "wrapper": type(model).__module__,
        "losses": losses,
        "validated": validated,
        "best": os.path.exists(best),
        "sum": sum(p.detach().double().abs().sum().item() for p in model.parameters()),
    }), flush=True)  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

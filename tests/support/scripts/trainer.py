"""A training script as for torchrun: nothing in it knows of MPI.

torchrun --nproc-per-node 2 trainer.py 3 --snapshot snapshot.pt
"""

import argparse
import json
import os

import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(5)
        self.points = torch.rand(size, 20, generator=generator)
        self.targets = self.points.sum(1, keepdim=True)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.targets[index]


def setup():
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        init_process_group(backend="nccl")
    else:
        init_process_group(backend="gloo")


class Trainer:
    def __init__(self, model, data, optimizer, snapshot):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.data, self.optimizer, self.snapshot = data, optimizer, snapshot
        self.first_epoch = 0
        if os.path.exists(snapshot):
            state = torch.load(snapshot, weights_only=True)
            model.load_state_dict(state["MODEL_STATE"])
            self.first_epoch = state["EPOCHS_RUN"]
        self.model = DDP(model)
        self.losses = []

    def step(self, points, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(points), targets)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def train(self, epochs):
        for epoch in range(self.first_epoch, epochs):
            self.data.sampler.set_epoch(epoch)
            for points, targets in self.data:
                self.step(points, targets)
            if self.local_rank == 0:
                state = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
                torch.save(state, self.snapshot)


def main(arguments):
    setup()
    data = Points(64)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(
        data, 8, sampler=DistributedSampler(data), shuffle=False, num_workers=arguments.workers
    )
    trainer = Trainer(model, loader, optimizer, arguments.snapshot)
    trainer.train(arguments.epochs)
    print(json.dumps({
        "rank": trainer.global_rank,
        "world": int(os.environ["WORLD_SIZE"]),
        "losses": trainer.losses,
        "ddp": type(trainer.model).__module__,
        "threads": torch.get_num_threads(),
    }))  # fmt: skip
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("--snapshot", required=True)
    parser.add_argument("--workers", type=int, default=0)
    main(parser.parse_args())

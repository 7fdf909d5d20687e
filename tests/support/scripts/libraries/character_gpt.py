"""Training a character GPT as the minGPT-ddp example of pytorch/examples does, on its own text.

torchrun --nproc-per-node 2 character_gpt.py FOLDER CASE ...

A trainer object with a snapshot, parameters with and without weight decay, autocast and clipping;
nothing in it knows of MPI. Each rank prints a line of JSON for each case. The folder is shared.
"""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.distributed import destroy_process_group, get_backend, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

TEXT = "the gradients of all ranks are averaged while backward still computes the others; " * 8


class Characters(Dataset):
    def __init__(self, length):
        self.length = length
        self.known = sorted(set(TEXT))
        self.codes = torch.tensor([self.known.index(character) for character in TEXT])

    def __len__(self):
        return (len(self.codes) - 1) // 4 - self.length

    def __getitem__(self, index):
        part = self.codes[4 * index : 4 * index + self.length + 1]
        return part[:-1], part[1:]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.attend(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.inner(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, kinds, length, width=32, heads=2, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(kinds, width)
        self.positions = nn.Parameter(torch.zeros(1, length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, kinds, bias=False)

    def forward(self, x, targets):
        hidden = self.blocks(self.tokens(x) + self.positions[:, : x.shape[1]])
        scores = self.head(self.norm(hidden))
        return scores, nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


@dataclass
class Snapshot:
    model: dict
    optimizer: dict
    epochs: int


class Trainer:
    def __init__(self, path, autocast):
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.path, self.autocast, self.epochs = path, autocast, 0
        dataset = Characters(16)
        self.loader = DataLoader(
            dataset, 8, shuffle=False, num_workers=2, sampler=DistributedSampler(dataset)
        )
        torch.manual_seed(1)
        self.model = GPT(len(dataset.known), 16)
        small = [p for p in self.model.parameters() if p.ndim < 2]
        large = [p for p in self.model.parameters() if p.ndim >= 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}],
            lr=3e-3, betas=(0.9, 0.95),
        )  # fmt: skip
        if os.path.exists(path):
            snapshot = Snapshot(**torch.load(path, map_location="cpu", weights_only=True))
            self.model.load_state_dict(snapshot.model)
            self.optimizer.load_state_dict(snapshot.optimizer)
            self.epochs = snapshot.epochs
        self.model = DDP(self.model)
        self.losses = []

    def batch(self, x, targets):
        mixed = torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()
        with torch.set_grad_enabled(True), mixed:
            _, loss = self.model(x, targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())

    def train(self, until):
        while self.epochs < until:
            self.loader.sampler.set_epoch(self.epochs)
            for x, targets in self.loader:
                self.batch(x, targets)
            self.epochs += 1
            if self.local_rank == 0:
                model = getattr(self.model, "module", self.model)
                snapshot = Snapshot(model.state_dict(), self.optimizer.state_dict(), self.epochs)
                torch.save(asdict(snapshot), self.path)
            torch.distributed.barrier()


def main(folder, *cases):
    init_process_group(backend="gloo")
    for case in cases:
        path = os.path.join(folder, f"{case}.pt")
        first = Trainer(path, case == "autocast")
        first.train(2)
        second = Trainer(path, case == "autocast")  # from the snapshot
        second.train(3)
        print(json.dumps({
            "case": case,
            "rank": first.rank,
            "world": torch.distributed.get_world_size(),
            "backend": get_backend(),
            "wrapper": type(second.model).__module__,
            "losses": first.losses + second.losses,
            "sum": sum(p.detach().double().abs().sum().item() for p in second.model.parameters()),
        }), flush=True)  # fmt: skip
    destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

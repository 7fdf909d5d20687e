"""Training with torch's tensor parallel, alone and with DDP or FSDP2, as for torchrun.

torchrun --nproc-per-node 2 tensor_parallel.py FOLDER CASE ...

The mesh of ranks starts torch.distributed by itself; nothing in it knows of MPI. Each rank prints a
line of JSON for each case. The folder is shared.
"""

import json
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH, LENGTH = 32, 16, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelized(mesh, sequence=False):
    torch.manual_seed(1)
    model = Model()
    if sequence:
        # Between blocks each rank has a part of the sentence, and of the scores.
        plan = {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        }
        of_block = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    else:
        plan = {
            "words": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        of_block = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, of_block)
    return parallelize_module(model, mesh, plan)


def train(model, part, parts, folder=None, sequence=False):
    """Train on this rank's part of the batches; with a folder, write and read a checkpoint."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(WORDS, (6, 4 * parts, LENGTH + 1), generator=generator)
    losses, norms = [], []

    def steps(numbers):
        for number in numbers:
            batch = words[number].chunk(parts)[part]
            scores = model(batch[:, :-1])
            with loss_parallel() if sequence else nullcontext():
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
                loss.backward()
            if all(isinstance(p, DTensor) for p in model.parameters()):  # torch mixes no kinds
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                norms.append(norm.full_tensor().item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())

    steps(range(3))
    if folder is not None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    steps(range(3, 6))
    if folder is not None:
        weights, state = get_state_dict(model, optimizer)
        dcp.load(kept := {"model": weights, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"]
        )
        steps(range(3, 6))
    whole = [getattr(p.detach(), "full_tensor", p.detach)() for p in model.parameters()]
    return {
        "losses": losses,
        "norms": norms,
        "wrapper": type(model).__module__,
        "sum": sum(p.double().abs().sum().item() for p in whole),
    }


def tensor(folder):
    """Layers split over all ranks."""
    return train(parallelized(init_device_mesh("cpu", (dist.get_world_size(),))), 0, 1)


def sequence(folder):
    """Sentences are split too, and the loss is of parts of the scores."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return train(parallelized(mesh, sequence=True), 0, 1, sequence=True)


def shards(folder):
    """FSDP2, and a checkpoint of parts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    model = Model()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return train(model, mesh.get_local_rank(), mesh.size(), folder)


def grid():
    shape = (dist.get_world_size() // 2, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))


def tensor_and_ddp(folder):
    """Layers split over pairs of ranks, and DDP over the pairs."""
    mesh = grid()
    model = DistributedDataParallel(parallelized(mesh["tensor"]), device_mesh=mesh["data"])
    return train(model, mesh["data"].get_local_rank(), mesh["data"].size())


def tensor_and_shards(folder):
    """Layers split over pairs of ranks, and sharded over the pairs."""
    mesh = grid()
    model = parallelized(mesh["tensor"], sequence=True)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["data"])
    part, parts = mesh["data"].get_local_rank(), mesh["data"].size()
    return train(model, part, parts, folder, sequence=True)


CASES = {
    "tensor": tensor,
    "sequence": sequence,
    "shards": shards,
    "tensor_and_ddp": tensor_and_ddp,
    "tensor_and_shards": tensor_and_shards,
}


def main(folder, *cases):
    init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for case in cases:
        said = CASES[case](os.path.join(folder, case))
        place = {
            "case": case,
            "rank": dist.get_rank(),
            "world": dist.get_world_size(),
            "backend": dist.get_backend(),
        }
        print(json.dumps(place | said), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

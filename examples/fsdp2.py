"""Train a small transformer whose parameters are divided among the ranks, by torch's fully_shard.

    mpirun -n 2 python examples/fsdp2.py
    torchrun --nproc-per-node 2 examples/fsdp2.py --backend gloo
    mpirun -n 2 python -m mpiddp --backend keep examples/fsdp2.py --backend gloo

It learns to continue its own source: a token is a byte. Each rank has a part of each parameter, its
gradient and its state in AdamW; a layer is whole only while it is computed.
Comments starting with MPI mark what a script for one process would not have.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import mpiddp  # noqa: F401  # MPI: makes the backend known

CONTEXT = 64
WIDTH = 96


class Model(nn.Module):
    """A model of bytes; what it returns is the loss of its scores of each next one."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, pieces: Tensor) -> Tensor:
        """Return the loss. Collective."""
        text = pieces[:, :-1]
        x = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        before = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=before, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), pieces[:, 1:].flatten())


def main() -> None:
    """Train, and print the mean loss of all ranks. Collective."""
    parser = argparse.ArgumentParser(description="Train with FSDP2 on MPI ranks.")
    parser.add_argument("--backend", default="mpiddp", help="mpiddp, or gloo")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16, help="pieces a step, on all ranks")
    args = parser.parse_args()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # MPI: the ranks of a node share its cores

    dist.init_process_group(args.backend)  # MPI: from here on torch.distributed works
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # MPI: every rank makes the same model, and keeps its part
    model = Model(args.layers)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)  # MPI: gathered when it is needed, one after the other
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    for step in range(args.steps):
        starts = torch.randint(len(text) - CONTEXT, (args.batch_size,), generator=generator)
        # MPI: all ranks draw the same places, and each takes every world_size-th of them.
        pieces = torch.stack([text[i : i + CONTEXT + 1] for i in starts[rank::world_size].tolist()])
        loss = model(pieces)
        optimizer.zero_grad()
        loss.backward()  # MPI: each rank gets its part of the mean of the gradients
        optimizer.step()

        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.5f}", flush=True)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    if rank == 0:
        print(f"rank 0 of {world_size} has {held} of {whole} parameters", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

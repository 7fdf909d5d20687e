"""Continue a sequence of tokens with a decoder whose layers are divided among the ranks.

    mpirun -n 2 python examples/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --backend gloo
    mpirun -n 2 python -m mpiddp --backend keep examples/tensor_parallel.py --backend gloo

The model is made in place, with random weights: what it says means nothing, and is the same on any
number of ranks. Each token takes two small all-reduces a layer, so the backend is much of the time.
Comments starting with MPI mark what a script for one process would not have.
"""

import argparse
import os
import time
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import mpiddp  # noqa: F401  # MPI: makes the backend known

WORDS = 1024
WIDTH = 256
HEADS = 8


class Block(nn.Module):
    """One layer: attention to all tokens so far, whose keys and values it keeps; a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations after this layer, of the tokens that are new. Collective."""
        normed = self.norm1(x)
        # MPI: a rank's linears give the outputs of its own heads, however many these are.
        query, key, value = (
            linear(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        if self.kept is not None:
            key, value = (torch.cat(both, 2) for both in zip(self.kept, (key, value), strict=True))
        self.kept = key, value
        # Several new tokens are the prompt, where each sees those before it.
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=x.shape[1] > 1)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return cast(Tensor, x + self.down(F.silu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """A decoder: scores of the next token. Positions are embedded, as the tokens are."""

    def __init__(self, layers: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, place: int) -> Tensor:
        """Return the scores after the last of these tokens, which begin at `place`. Collective."""
        x = self.words(tokens) + self.places.weight[place : place + tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x[:, -1])))


def divide(model: Decoder, mesh: DeviceMesh) -> None:
    """Leave this rank its part of each matrix. Collective."""
    # MPI: a rank has some columns of what comes first and the matching rows of what follows, so
    # only the sum after both travels.
    columns, rows = ColwiseParallel, RowwiseParallel
    for block in model.blocks:
        parallelize_module(
            cast(nn.Module, block),
            mesh,
            {
                "query": columns(), "key": columns(), "value": columns(), "out": rows(),
                "up": columns(), "down": rows(),
            },
        )  # fmt: skip
    parallelize_module(model, mesh, {"head": columns(output_layouts=Replicate())})


@torch.no_grad()
def main() -> None:
    """Make the model, divide it, and decode. Collective."""
    parser = argparse.ArgumentParser(description="Decode with tensor parallelism on MPI ranks.")
    parser.add_argument("--backend", default="mpiddp", help="mpiddp, or gloo")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=16, help="tokens to begin with")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to add")
    args = parser.parse_args()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # MPI: the ranks of a node share its cores

    dist.init_process_group(args.backend)  # MPI: from here on torch.distributed works
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if HEADS % world_size:
        raise SystemExit(f"{HEADS} heads cannot be divided among {world_size} ranks")

    torch.manual_seed(0)  # MPI: every rank makes the whole model, and keeps its part
    model = Decoder(args.layers, args.prompt + args.tokens)
    divide(model, init_device_mesh("cpu", (world_size,)))

    tokens = torch.randint(WORDS, (1, args.prompt))
    new, place = tokens, 0
    for step in range(args.tokens):
        if step == 1:
            start = time.perf_counter()  # what follows takes one token at a time
        scores = model(new, place)
        place += new.shape[1]
        new = scores.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
    seconds = time.perf_counter() - start if args.tokens > 1 else 0.0

    said = tokens[0, args.prompt :].tolist()
    others: list[list[int]] = [[] for _ in range(world_size)]
    dist.all_gather_object(others, said)
    if others != [said] * world_size:
        raise RuntimeError(f"rank {rank} has chosen other tokens than another rank")
    if rank == 0:
        print("tokens:", *said)
        if seconds:
            rate = (args.tokens - 1) / seconds
            print(f"{rate:.1f} tokens a second on {world_size} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

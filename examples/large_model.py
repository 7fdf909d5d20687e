"""Train a decoder of a billion parameters on 4 ranks of one machine with 24 GiB of memory.

    mpirun -n 4 python examples/large_model.py
    mpirun -n 4 python examples/large_model.py --layers 4 --width 256

Parameters, gradients and AdamW's state, 16 bytes a parameter in float32, lie on a node once,
whatever its number of ranks. The text is the source of Python's library, byte by byte: nothing is
downloaded.
Comments starting with MPI mark what a script for one process would not have.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import mpiddp
from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer

BYTES = 256


class Layer(nn.Module):
    """Causal attention, and two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what follows x, of shape (batch, length, width)."""
        parts = self.attention(self.before(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class Decoder(nn.Module):
    """Predicts each next byte."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits for bytes of shape (batch, length)."""
        x = self.tokens(text) + self.places(torch.arange(text.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x))


def make_model(options: argparse.Namespace) -> nn.Module:
    """Return the untrained decoder, on all but the first rank of a node without content."""
    torch.manual_seed(0)
    sizes = options.layers, options.width, options.heads, options.length
    # MPI: the ranks of a node will share the first one's, so only that one makes numbers. Memory
    # that nobody has written costs nothing.
    if dist.get_node_local_rank() == 0:
        return Decoder(*sizes)
    with torch.device("meta"):
        model = Decoder(*sizes)
    return model.to_empty(device="cpu")


def main() -> None:
    """Train, and print the loss, the time and the memory of all ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="of a text, in bytes")
    parser.add_argument("--batch", type=int, default=1, help="texts of a rank in a step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lr", type=float, default=3e-5)
    options = parser.parse_args()

    mpiddp.init_process_group()  # MPI
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # MPI: the first rank of each node makes the same numbers, so that nothing has to be sent.
    model = DDP(make_model(options), shared_parameters=True, init_sync=False)
    optimizer = NodeOptimizer(model, torch.optim.AdamW, lr=options.lr)

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    source = b"\n".join(path.read_bytes() for path in files)
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(rank)  # MPI: each rank reads other texts
    if rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{count / 1e9:.2f} billion parameters on {ranks} ranks", flush=True)
    for step in range(options.steps):
        began = time.perf_counter()
        last = len(text) - options.length - 1
        starts = torch.randint(last, (options.batch,), generator=generator)
        window = torch.stack([text[at : at + options.length + 1] for at in starts.tolist()]).long()
        optimizer.zero_grad()
        logits = model(window[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)  # MPI: of all ranks' texts
        if rank == 0:
            seconds = time.perf_counter() - began
            print(f"step {step}: loss {mean:.3f}, {seconds:.1f} s", flush=True)

    # MPI: of pages that several processes share, each has its part.
    held = torch.tensor(float(memory()))
    dist.all_reduce(held)
    if rank == 0:
        print(f"memory of all ranks: {held / 2**30:.2f} GiB", flush=True)
    mpiddp.destroy_process_group()  # MPI


def memory() -> int:
    """Return this process's part of the memory, in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


if __name__ == "__main__":
    main()

"""Train a small transformer to continue text, on any number of MPI ranks.

    mpirun -n 2 python examples/lm.py --generate 300
    mpirun -n 2 python examples/lm.py book1.txt book2.txt --save lm.pt
    mpirun -n 2 python examples/lm.py --load lm.pt --steps 0 --generate 300

Without files it reads the Python standard library's own sources. A token is a byte of UTF-8.
Comments starting with MPI mark what a script for one process would not have.
"""

import argparse
import contextlib
import hashlib
import math
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from tqdm import tqdm

import mpiddp
from mpiddp import DistributedDataParallel as DDP

CONTEXT = 64  # tokens that a prediction can look back on
WIDTH = 128
HEADS = 4
LAYERS = 2
MAX_BYTES = 2_000_000  # of text


class Block(nn.Module):
    """One transformer layer: causal attention, then a two-layer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations after this layer."""
        heads: Tensor = self.qkv(self.norm1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class CharLM(nn.Module):
    """A character model: logits of the next byte at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a row of 256 logits for each token."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def load_text(files: list[Path]) -> tuple[Tensor, Tensor]:
    """Return the bytes to train on, and a tenth of the text held out."""
    if not files:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        random.Random(0).shuffle(files)
    text = b"\n".join(file.read_bytes() for file in files)[:MAX_BYTES]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = len(tokens) * 9 // 10
    if len(tokens) - cut <= CONTEXT:
        raise SystemExit(f"too little text: {len(tokens)} bytes, {11 * CONTEXT} are needed")
    return tokens[:cut], tokens[cut:]


def load_model(path: str) -> CharLM:
    """Return the model saved in `path`: from model.state_dict() or from ddp.state_dict()."""
    state = torch.load(path, weights_only=True)
    consume_prefix_in_state_dict_if_present(state, "module.")  # the names DDP's wrapper gives
    model = CharLM()
    model.load_state_dict(state)
    return model


@torch.no_grad()
def bits_per_character(model: nn.Module, text: Tensor) -> float:
    """Return the mean cost of a character of `text`, at most 64 KB of it. Collective."""
    model.eval()
    text = text[: 65536 + 1]
    windows = torch.arange(0, len(text) - CONTEXT, CONTEXT)
    # MPI: rank r reads every world_size-th window from r on; then both sums go over all ranks.
    sums = torch.zeros(2, dtype=torch.float64)
    for starts in torch.split(windows[dist.get_rank() :: dist.get_world_size()], 64):
        window = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        target = window[:, 1:].flatten()
        nats = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), target, reduction="sum")
        characters = ((target & 0xC0) != 0x80).sum()  # UTF-8: all but continuation bytes
        sums += torch.stack([nats.double() / math.log(2), characters.double()])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def generate(model: nn.Module, length: int) -> str:
    """Return `length` sampled bytes as text. Local: one rank can do it alone."""
    model.eval()
    tokens = torch.tensor([[ord("\n")]])
    for _ in range(length):
        logits = model(tokens[:, -CONTEXT:])[:, -1]
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.8).softmax(1), 1)], dim=1)
    model.train()
    return bytes(tokens[0].tolist()).decode(errors="replace")


def check_replicas(model: nn.Module) -> str:
    """Return the sha256 of the model's state; raise where another rank's differs. Collective."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    mine = torch.tensor(list(digest.digest()), dtype=torch.uint8)
    hashes = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(hashes, mine)
    others = [rank for rank, other in enumerate(hashes) if not torch.equal(other, mine)]
    if others:
        raise RuntimeError(f"the model of rank {dist.get_rank()} differs from those of {others}")
    return digest.hexdigest()


def main() -> None:
    """Train, evaluate, compare the replicas, save and generate. Collective."""
    parser = argparse.ArgumentParser(description="Train a character model on MPI ranks.")
    parser.add_argument("files", nargs="*", type=Path, help="default: the standard library")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="windows a step, on all ranks")
    parser.add_argument("--accumulate", type=int, default=2, help="backwards a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="FILE", help="write the model's state_dict to FILE")
    parser.add_argument("--load", metavar="FILE", help="start from FILE")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="print N bytes")
    args = parser.parse_args()

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # MPI: the ranks of a node share its cores

    mpiddp.init_process_group()  # MPI: from here on torch.distributed works
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train, held_out = load_text(args.files)

    torch.manual_seed(args.seed)
    # MPI: every rank starts from the weights of rank 0, so only rank 0 needs to read the file.
    ddp = DDP(load_model(args.load) if args.load and rank == 0 else CharLM())
    model = ddp.module  # the plain net, for what one rank does alone and for saving
    optimizer = torch.optim.AdamW(ddp.parameters(), args.lr)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=max(1, args.steps // 10))

    # MPI: the batch is split over the ranks, and each rank draws windows of its own.
    windows = max(1, args.batch_size // (world_size * args.accumulate))
    draw = torch.Generator().manual_seed(args.seed * 10_000 + rank)
    first = bits_per_character(model, held_out)
    start = time.perf_counter()
    bar = tqdm(total=args.steps, unit=" steps", disable=rank != 0)
    for _ in range(args.steps):
        optimizer.zero_grad()
        for micro in range(args.accumulate):
            at = torch.randint(len(train) - CONTEXT, (windows, 1), generator=draw)
            batch = train[at + torch.arange(CONTEXT + 1)]
            # MPI: gradients add up locally under no_sync; only the last backward communicates.
            # The forward belongs inside as well: there DDP prepares for the coming backward.
            last = micro == args.accumulate - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                logits = ddp(batch[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                (loss / args.accumulate).backward()
        # MPI: the gradients are the same on all ranks by now, so all clip by the same factor.
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        bar.set_postfix(bits=f"{loss.item() / math.log(2):.3f}", refresh=False)
        bar.update()
    bar.close()
    seconds = time.perf_counter() - start

    after = bits_per_character(model, held_out)
    digest = check_replicas(model)
    if rank == 0:  # MPI: one rank writes and prints; nothing in here may be collective
        if args.save:
            torch.save(model.state_dict(), args.save)
        if args.generate:
            print(generate(model, args.generate))
        print(f"held-out text: {first:.3f} bits per character before {args.steps} steps, "
              f"{after:.3f} after, {seconds:.1f} s")  # fmt: skip
        print(f"all {world_size} replicas hold the same bits: sha256 {digest}", flush=True)
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

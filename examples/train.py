"""Train a small convolutional net on handwritten digits, on any number of MPI ranks.

    mpirun -n 2 python examples/train.py
    mpirun -n 2 python examples/train.py --checkpoint digits --resume

The data are scikit-learn's bundled 1,797 images of 8 x 8 pixels: nothing is downloaded.
Comments starting with MPI mark what a script for one process would not have.
"""

import signal

# SLURM may announce the end of the job while Python still loads what follows: the signal is held
# back until preemption.install() takes it.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

import argparse
import hashlib
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import mpiddp
from mpiddp import DistributedDataParallel as DDP
from mpiddp import checkpoint, preemption


def make_model() -> nn.Module:
    """Return the untrained net."""
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1, bias=False), nn.BatchNorm2d(48), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(48, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(64 * 4 * 4, 10),
    )  # fmt: skip


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set, split the same way on every rank and in every run."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def synchronise_buffers(model: nn.Module) -> None:
    """Give every rank the BatchNorm statistics of rank 0. Collective."""
    # MPI: gradients are averaged, so parameters agree after each step. Running means and variances
    # are not gradients: each rank updates its own, from its own images, and DDP overwrites them
    # with those of rank 0 only when the next training forward begins. After the last step of an
    # epoch they therefore differ, until this.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


@torch.no_grad()
def evaluate(model: nn.Module, test: TensorDataset) -> float:
    """Return the accuracy on the whole test set, the same number on every rank. Collective."""
    # MPI: rank r takes every world_size-th image from r on. DistributedSampler would repeat some
    # images to give each rank equally many, and they would count twice. `model` is the plain net,
    # not the DDP wrapper: a wrapper may communicate in forward, and needs equally many calls.
    model.eval()
    images, labels = test[dist.get_rank() :: dist.get_world_size()]
    correct: Tensor = (model(images).argmax(1) == labels).sum()
    dist.all_reduce(correct)
    model.train()
    return int(correct) / len(test)


def check_replicas(model: nn.Module) -> str:
    """Return the sha256 of the model's state; raise where another rank's differs. Collective."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    mine = torch.tensor(list(digest.digest()), dtype=torch.uint8)
    hashes = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(hashes, mine)
    others = [rank for rank, other in enumerate(hashes) if not torch.equal(other, mine)]
    if others:
        raise RuntimeError(f"rank {dist.get_rank()} differs from ranks {others}")
    return digest.hexdigest()


def main() -> None:
    """Train, evaluate after every epoch and compare the replicas. Collective."""
    parser = argparse.ArgumentParser(description="Train a digit classifier on MPI ranks.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, on all ranks")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", metavar="FOLDER", help="save there after every epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if any")
    parser.add_argument(
        "--requeue", action="store_true", help="at SIGUSR1, back into SLURM's queue"
    )
    parser.add_argument("--stop-after-epoch", type=int, metavar="N", help="as if interrupted there")
    args = parser.parse_args()
    if (args.resume or args.requeue) and not args.checkpoint:
        parser.error("--resume and --requeue need --checkpoint FOLDER")

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # MPI: the ranks of a node share its cores

    mpiddp.init_process_group()  # MPI: from here on torch.distributed works
    preemption.install()  # MPI: a signal on any rank is told to all
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"world: {world_size} ranks on {mpiddp.get_topology().node_count} nodes", flush=True)

    # MPI: DistributedSampler deals the images out, equally many to each rank. The global batch is
    # split over the ranks; BatchNorm needs more than one image a rank, so it grows when there are
    # many ranks. drop_last leaves out a smaller last batch for the same reason.
    train, test = load_data()
    batch_size = max(4, args.batch_size // world_size)
    sampler: DistributedSampler[Any] = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    ddp = DDP(make_model())  # MPI: every rank starts from the weights of rank 0
    model = ddp.module
    optimizer = torch.optim.SGD(ddp.parameters(), args.lr, momentum=0.9, weight_decay=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    first_epoch = batches_done = 0
    total_loss = torch.zeros(())

    if args.resume:
        # MPI: rank 0 reads, and the others get what it has read.
        found = checkpoint.load(args.checkpoint)
        if found:
            model.load_state_dict(found.state["model"])
            optimizer.load_state_dict(found.state["optimizer"])
            scheduler.load_state_dict(found.state["scheduler"])
            first_epoch, batches_done = divmod(found.step, len(loader))
            total_loss += found.state["loss"] if rank == 0 else 0
        if rank == 0:
            done = f"{first_epoch} epochs and {batches_done} batches are done"
            done = done if found else "not there, starting anew"
            print(f"resume: {args.checkpoint}: {done}", flush=True)

    def save(step: int) -> None:
        """Save all that the steps after this one depend on. Collective."""
        dist.all_reduce(total_loss)
        total_loss.mul_(rank == 0)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                 "scheduler": scheduler.state_dict(), "loss": total_loss}  # fmt: skip
        checkpoint.save(state, args.checkpoint, step=step)

    def end_early(step: int, is_saved: bool = False) -> None:
        """Save, and let SLURM start the job again, as somebody has asked it to end. Collective."""
        if args.checkpoint and not is_saved:
            save(step)
        if rank == 0:
            saved = "saved" if args.checkpoint else "nothing saved"
            print(f"asked to end: {saved} after step {step}", flush=True)
        if args.requeue:
            preemption.requeue()
        mpiddp.destroy_process_group()

    last_epoch = min(args.epochs, args.stop_after_epoch or args.epochs)
    asked_to_end = False
    start = time.perf_counter()
    for epoch in range(first_epoch, last_epoch):
        sampler.set_epoch(epoch)  # MPI: another order each epoch, the same on all ranks
        bar = tqdm(
            desc=f"epoch {epoch + 1}/{args.epochs}",
            total=len(loader) * batch_size * world_size,
            unit=" samples",
            disable=rank != 0,  # MPI: one bar, not one for each rank
        )
        for batch, (images, labels) in enumerate(loader):
            bar.update(batch_size * world_size)
            if epoch == first_epoch and batch < batches_done:
                continue  # before the interruption
            # The random state of a step depends on these numbers alone, so a checkpoint needs no
            # generator's state. MPI: each rank draws its own dropout.
            step = epoch * len(loader) + batch
            torch.manual_seed((args.seed * 1_000_000 + step) * 10_000 + rank)
            loss = nn.functional.cross_entropy(ddp(images), labels)
            optimizer.zero_grad()
            loss.backward()  # MPI: gradients are averaged over the ranks meanwhile
            optimizer.step()
            total_loss += loss.detach()
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            # MPI: all ranks get the same answer, in the same step.
            asked_to_end = preemption.requested()
            if asked_to_end:
                break
        bar.close()
        # What is saved is whole: after the last batch of an epoch, with the scheduler's step and
        # with what follows.
        if asked_to_end and batch + 1 < len(loader):
            end_early(step + 1)
            return
        scheduler.step()

        synchronise_buffers(model)
        accuracy = evaluate(model, test)
        loss_mean = total_loss.clone()
        dist.all_reduce(loss_mean)
        loss_mean /= len(loader) * world_size
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss_mean:.4f}, accuracy {accuracy:.2%}", flush=True)
        total_loss.zero_()
        if args.checkpoint:
            save((epoch + 1) * len(loader))
        if asked_to_end and epoch + 1 < last_epoch:
            end_early((epoch + 1) * len(loader), is_saved=True)
            return

    accuracy = evaluate(model, test)
    digest = check_replicas(model)
    if rank == 0:
        seconds = time.perf_counter() - start
        print(f"test accuracy {accuracy:.2%} after {last_epoch} epochs, {seconds:.1f} s")
        print(f"all {world_size} replicas hold the same bits: sha256 {digest}", flush=True)
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

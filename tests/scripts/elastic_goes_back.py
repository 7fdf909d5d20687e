"""Train with mpiddp.elastic; a rank is killed between a step and its commit, or elsewhere.

    mpirun --with-ft ulfm -n 3 python elastic_goes_back.py WHERE [--every K]

The last rank ends at WHERE: `start` (before the first step), `backward`, `log` (while the others
average the loss for a log, after the optimizer's step), or `epoch` (after the scheduler's step, in
the next step). Each K steps is a commit. All ranks have the same batches, so what is learned does
not depend on how many there are. Each rank that ends prints a line of JSON.
"""

import argparse
import json
import os
import signal

import torch
import torch.distributed as dist

import mpiddp
from mpiddp import DistributedDataParallel as DDP
from mpiddp import elastic

EPOCHS, STEPS = 3, 3


def parts():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def loss_of(model, step):
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).double()
    return (model(batch) - batch[:, :4]).square().sum(1).mean()


def learned(model, optimizer, scheduler):
    """Return what tells two trainings apart."""
    tensors = [*model.state_dict().values()]
    tensors += [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    sums = [tensor.double().square().sum().item() for tensor in tensors]
    return [*sums, optimizer.param_groups[0]["lr"], scheduler.last_epoch]


def alone():
    """Return what a single process learns that nothing disturbs."""
    model, optimizer, scheduler = parts()
    for step in range(EPOCHS * STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if step % STEPS == STEPS - 1:
            scheduler.step()
    return learned(model, optimizer, scheduler)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("where", choices=["start", "backward", "log", "epoch"])
    parser.add_argument("--every", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    mpiddp.init_process_group()
    rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    model, optimizer, scheduler = parts()
    state = elastic.State(model=model, optimizer=optimizer, scheduler=scheduler, step=0, epoch=0)
    began = []

    def may_end(where, step):
        lost_at = {"start": 0, "epoch": 2 * STEPS}.get(where, STEPS + 1)
        if last and (where, step) == (arguments.where, lost_at):
            os.kill(os.getpid(), signal.SIGKILL)

    @elastic.run
    def train(state):
        began.append((dist.get_world_size(), state.step))
        ddp = DDP(state.model, init_sync=False)
        while state.epoch < EPOCHS:
            while state.step < STEPS * (state.epoch + 1):
                may_end("start", state.step)
                may_end("epoch", state.step)
                loss = loss_of(ddp, state.step)
                loss.backward()
                may_end("backward", state.step)
                state.optimizer.step()
                state.optimizer.zero_grad()
                may_end("log", state.step)
                dist.all_reduce(loss.detach())
                state.step += 1
                if state.step % arguments.every == 0:
                    state.commit()
            state.scheduler.step()
            state.epoch += 1

    train(state)
    said = {"rank": rank, "began": began, "learned": learned(model, optimizer, scheduler)}
    print(json.dumps(said), flush=True)
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()

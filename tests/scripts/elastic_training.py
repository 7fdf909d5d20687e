"""Train with mpiddp.elastic; ranks are killed at given moments.

    mpirun --with-ft ulfm -n 4 python elastic_training.py STEPS [--kill RANK:SECONDS]
        [--kill-at RANK:STEP] [--options JSON] [--grow STEP:COUNT]
        [--admit FOLDER] [--under-way FILE] [--after-another]
        [--announce-at RANK:STEP] [--kill-in RANK:STEP:MEETING]

SECONDS count from when the rank began the function; a rank of -1 is a process that came later.
With --admit it trains until another job has come, and STEPS more. The FILE is made after 20 steps.
With --announce-at the end of the job is announced to a rank, and all stop when they are told.
With --after-another another elastic function has run before.
With --kill-in a rank is killed when it comes to a meeting of ranks that share parameters, after so
many steps; the meeting "writing" is the moment in which it has begun to write a commit.
OPTIONS are those of `elastic.run`. Each rank that ends prints a line of JSON.
"""

import argparse
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import mpiddp
from mpiddp import DistributedDataParallel as DDP
from mpiddp import elastic, preemption
from mpiddp.ddp.shared_parameters import SharedParameters
from mpiddp.elastic.shared_copies import _Copy

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--kill", action="append", default=[])
parser.add_argument("--kill-at", default="-2:0")
parser.add_argument("--options", type=json.loads, default={})
parser.add_argument("--grow", default="-1:0")
parser.add_argument("--admit")
parser.add_argument("--under-way", type=Path)
parser.add_argument("--after-another", action="store_true")
parser.add_argument("--announce-at")
parser.add_argument("--kill-in", default="-2:0:")
arguments = parser.parse_args()
STEPS = arguments.steps
KILLS = {int(rank): float(after) for rank, _, after in (a.partition(":") for a in arguments.kill)}
KILLED, KILLED_AT = map(int, arguments.kill_at.split(":"))
ANNOUNCED, ANNOUNCED_AT = map(int, (arguments.announce_at or "-2:0").split(":"))
GROW_AT, MORE = map(int, arguments.grow.split(":"))
CAME = MPI.Comm.Get_parent() != MPI.COMM_NULL or "MPIDDP_JOIN" in os.environ
ALONE = 0 if CAME or not arguments.admit else MPI.COMM_WORLD.Get_size()
KILLED_IN, IN_STEP, MEETING = arguments.kill_in.split(":")
START = -1 if CAME else MPI.COMM_WORLD.Get_rank()


def kill_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_meeting() -> None:
    """Let this process end itself where it comes to a meeting."""

    def killing(method: Callable[..., Any], where: int) -> Callable[..., Any]:
        def meeting(*args: Any) -> Any:
            name = args[where] if where else "writing"
            if (name, state.step) == (MEETING, int(IN_STEP)):
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args)

        return meeting

    SharedParameters._meet = killing(SharedParameters._meet, 1)
    _Copy.write = killing(_Copy.write, 0)


torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)  # so that what is learned can be compared, see learned()
torch.manual_seed(START + 1)
mpiddp.init_process_group()
model = torch.nn.Sequential(
    torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(
    torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
)
sampler = elastic.Sampler(data)
state = elastic.State(model=model, optimizer=optimizer, sampler=sampler, step=0, epoch=0)
worlds = []


@elastic.run(**arguments.options)
def train(state):
    worlds.append((dist.get_world_size(), state.step))
    if len(worlds) == 1 and START in KILLS:
        threading.Thread(target=kill_after, args=[KILLS[START]], daemon=True).start()
    if arguments.announce_at:
        preemption.install()
    if int(KILLED_IN) == START:
        kill_in_meeting()
    ddp = DDP(state.model, init_sync=False)
    loader = torch.utils.data.DataLoader(data, 8, sampler=state.sampler)
    steps = 10**9 if dist.get_world_size() == ALONE else STEPS
    if arguments.admit:
        steps += state.step
    while state.step < steps:
        state.sampler.set_epoch(state.epoch)
        for number, (batch,) in enumerate(loader):
            if (START, state.step) == (ANNOUNCED, ANNOUNCED_AT) and len(worlds) == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if (START, state.step) == (KILLED, KILLED_AT):
                os.kill(os.getpid(), signal.SIGKILL)
            state.optimizer.zero_grad()
            (ddp(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
            state.optimizer.step()
            state.sampler.record_batch(number, 8)
            state.step += 1
            state.commit()
            if arguments.under_way and state.step == 20:
                arguments.under_way.touch()
            if arguments.announce_at and preemption.requested():
                steps = state.step
            if state.step == GROW_AT:
                elastic.grow(MORE)
            if arguments.admit and state.step % 10 == 0:
                elastic.admit(arguments.admit)
            if state.step == steps:
                break
        else:
            state.epoch += 1
    loss = (ddp(data[:][0]) - data[:][0].sum(1, keepdim=True)).square().mean()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


if arguments.after_another:
    elastic.run(lambda state: None)(elastic.State())
loss = train(state)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
said = {"rank": START, "worlds": worlds, "steps": state.step, "loss": loss, "epoch": state.epoch}
# At once: launchers mix what ranks write in pieces.
print(json.dumps(said | {"bits": digest.hexdigest()}) + "\n", end="", flush=True)
mpiddp.destroy_process_group()

"""Train with mpiddp.elastic, and tell what random numbers each step has drawn.

    mpirun --with-ft ulfm -n 3 python elastic_random.py STEPS [--kill RANK:STEP]
        [--fail RANK:STEP] [--options JSON] [--name NAME] [--leave-at STEP]

The rank of --kill is killed in that step, after it has drawn; that of --fail raises an exception.
With --leave-at all ranks end in that step by SIGKILL. Each rank that ends prints a line of JSON.
"""

import argparse
import json
import os
import random
import signal
import time

import numpy as np
import torch
import torch.distributed as dist

import mpiddp
from mpiddp import DistributedDataParallel as DDP
from mpiddp import elastic

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--kill", default="-2:0")
parser.add_argument("--fail", default="-2:0")
parser.add_argument("--options", type=json.loads, default={})
parser.add_argument("--name")
parser.add_argument("--leave-at", type=int, default=-1)
arguments = parser.parse_args()
KILL, FAIL = ([int(part) for part in a.split(":")] for a in (arguments.kill, arguments.fail))

torch.set_num_threads(1)
mpiddp.init_process_group()
START = dist.get_rank()
torch.manual_seed(START)
random.seed(START)
np.random.seed(START)  # noqa: NPY002
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = elastic.State(model=model, optimizer=optimizer, step=0, name=arguments.name)
worlds, drawn = [], {}


@elastic.run(**arguments.options)
def train(state):
    worlds.append((dist.get_world_size(), state.step))
    ddp = DDP(state.model, init_sync=False)
    while state.step < arguments.steps:
        now = [dist.get_rank(), state.step]
        batch = torch.rand(3, 4)
        drawn[state.step] = [batch[0, 0].item(), random.random(), np.random.random()]  # noqa: NPY002
        if state.step == arguments.leave_at:
            time.sleep(0.5)  # until the snapshot is written
            os.kill(os.getpid(), signal.SIGKILL)
        if len(worlds) == 1 and now == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(worlds) == 1 and now == FAIL:
            raise ValueError("this rank fails")
        state.optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        state.optimizer.step()
        state.step += 1
        state.commit()


train(state)
said = {"rank": START, "worlds": worlds, "drawn": [drawn.get(i) for i in range(arguments.steps)]}
print(json.dumps(said), flush=True)
mpiddp.destroy_process_group()

"""Train with hvd.elastic; a HorovodInternalError comes in the fourth step, once.

    mpirun -n 2 python horovod_errors.py HOW

HOW: `mismatch` (the ranks reduce tensors of different shapes), `all` (each rank raises it, between
backward and step), `one` (rank 1 raises it, while the others wait for it), `hosts` (each rank
raises a HostsUpdatedInterrupt). Each rank that ends prints a line of JSON.
"""

import json
import sys

import torch

import mpiddp.horovod as hvd
from mpiddp.horovod.errors import HostsUpdatedInterrupt

HOW, STEPS = sys.argv[1], 6

torch.set_num_threads(1)
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)
began, resets, losses = [], [], []


def fail():
    if HOW == "mismatch":
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="of two shapes")
    if HOW == "all" or (HOW == "one" and hvd.rank() == 1):
        raise hvd.HorovodInternalError("a link is down")
    if HOW == "hosts":
        raise HostsUpdatedInterrupt()
    hvd.allreduce(torch.ones(2), name="waits")


@hvd.elastic.run
def train(state):
    began.append([hvd.size(), state.step])
    while state.step < STEPS:
        generator = torch.Generator().manual_seed(state.step)
        loss = (model(torch.randn(8, 4, generator=generator).double()) - 1).square().mean()
        loss.backward()
        if state.step == 3 and len(began) == 1 and HOW != "hosts":
            fail()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        losses[state.step - 1 :] = [loss.item()]
        if state.step % 2 == 0:
            state.commit()
        if state.step == 3 and len(began) == 1 and HOW == "hosts":
            fail()
    return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


state.register_reset_callbacks([lambda: resets.append(hvd.size())])
total = train(state)
said = {"rank": hvd.rank(), "began": began, "resets": resets, "losses": losses, "total": total}
print(json.dumps(said), flush=True)
hvd.shutdown()

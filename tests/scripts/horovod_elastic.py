"""Train with hvd.elastic; ranks end after a number of batches.

    mpirun --with-ft ulfm -n 3 python horovod_elastic.py [--lose RANK:BATCHES] [--how exception]
        [--grow BATCHES:COUNT] [--options JSON]

RANK is that of the first world, -1 a process that came later. With --how exception a rank raises
one, else it is killed. OPTIONS are those of `mpiddp.elastic.run`, used instead of Horovod's name if
they are given. Each rank that ends prints a line of JSON.
"""

import argparse
import hashlib
import itertools
import json
import os
import signal

import torch
from mpi4py import MPI

import mpiddp.elastic
import mpiddp.horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--lose", action="append", default=[])
parser.add_argument("--how", choices=["kill", "exception"], default="kill")
parser.add_argument("--grow", default="-1:0")
parser.add_argument("--options", type=json.loads)
arguments = parser.parse_args()
LOST = [tuple(map(int, lost.split(":"))) for lost in arguments.lose]
GROW_AT, MORE = map(int, arguments.grow.split(":"))
EPOCHS, SIZE = 4, 4
CAME = MPI.Comm.Get_parent() != MPI.COMM_NULL

torch.set_num_threads(1)
hvd.init()
first_rank = -1 if CAME else hvd.rank()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
data = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
sampler = hvd.elastic.ElasticSampler(range(len(data)))
loader = torch.utils.data.DataLoader(range(len(data)), SIZE, sampler=sampler)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, seen=[])
worlds, left, drawn = [], {}, []


def adapt() -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * hvd.size()


def commit() -> None:
    """Note with the state what all ranks have processed since the last commit."""
    state.seen += itertools.chain(*hvd.allgather_object(drawn))
    drawn.clear()
    state.commit()


def end() -> None:
    if arguments.how == "exception":
        raise ValueError(f"rank {first_rank} fails")
    os.kill(os.getpid(), signal.SIGKILL)


run = hvd.elastic.run
if arguments.options is not None:
    run = mpiddp.elastic.run(**arguments.options)


@run
def train(state):
    worlds.append(hvd.size())
    drawn.clear()
    while state.epoch < EPOCHS:
        for number, indices in enumerate(loader):
            if (first_rank, state.batch) in LOST:
                end()
            state.optimizer.zero_grad()
            rows = data[indices]
            (state.model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
            state.optimizer.step()
            sampler.record_batch(number, SIZE)
            drawn.extend(indices.tolist())
            state.batch += 1
            if state.batch % 2 == 0:
                commit()
            if state.batch == GROW_AT and hvd.size() == worlds[0]:
                mpiddp.elastic.grow(MORE)
        commit()
        # Those that were dealt out twice, so that every rank has equally many, do not count.
        left[state.epoch] = len(data) - len(set(state.seen))
        state.epoch += 1
        state.seen = []
        state.sampler.set_epoch(state.epoch)
        state.commit()
    return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


state.register_reset_callbacks([adapt])
total = train(state)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
said = {
    "rank": first_rank,
    "worlds": worlds,
    "total": total,
    "left": left,
    "batches": state.batch,
    "rate": optimizer.param_groups[0]["lr"],
    "bits": digest.hexdigest(),
}
print(json.dumps(said), flush=True)
hvd.shutdown()

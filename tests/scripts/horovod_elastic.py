"""Train with hvd.elastic; a rank is killed after a number of batches.

    mpirun --with-ft ulfm -n 3 python horovod_elastic.py RANK BATCHES

Each rank that ends prints a line of JSON.
"""

import hashlib
import itertools
import json
import os
import signal
import sys

import torch

import mpiddp.horovod as hvd

KILLED, AFTER = int(sys.argv[1]), int(sys.argv[2])
EPOCHS, SIZE = 4, 4

torch.set_num_threads(1)
hvd.init()
first_rank = hvd.rank()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
data = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
sampler = hvd.elastic.ElasticSampler(range(len(data)))
loader = torch.utils.data.DataLoader(range(len(data)), SIZE, sampler=sampler)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)
worlds, seen = [], {}


def adapt() -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * hvd.size()


@hvd.elastic.run
def train(state):
    worlds.append(hvd.size())
    while state.epoch < EPOCHS:
        for number, indices in enumerate(loader):
            if hvd.rank() == KILLED and state.batch == AFTER and len(worlds) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            state.optimizer.zero_grad()
            rows = data[indices]
            (state.model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
            state.optimizer.step()
            sampler.record_batch(number, SIZE)
            state.batch += 1
            if state.batch % 2 == 0:
                state.commit()
        processed = itertools.chain(*hvd.allgather_object(sampler.processed_indices))
        left = len(data) - len(set(processed))
        seen[state.epoch] = left
        state.epoch += 1
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
    "left": seen,
    "batches": state.batch,
    "rate": optimizer.param_groups[0]["lr"],
    "bits": digest.hexdigest(),
}
print(json.dumps(said), flush=True)
hvd.shutdown()

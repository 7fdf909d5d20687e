"""What a script may hold of torch.distributed before it starts, and what it gets of it then."""

import copy
import io
import os
import pickle

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.parallel.distributed as inner
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import DistributedDataParallel as DDP

import mpiddp


class Derived(DDP):
    """As scripts do to reach the attributes of the wrapped module."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def construct(kind, **kwargs):
    made = kind(nn.Linear(2, 1), **kwargs)
    made(torch.ones(1, 2)).sum().backward()
    assert isinstance(made, nn.parallel.DistributedDataParallel)
    return type(made).__module__


dist.init_process_group()
assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "undefined")
assert mpiddp.get_backend() == "mpiddp"
ours = "mpiddp"
for kind in (DDP, DistributedDataParallel, nn.parallel.DistributedDataParallel):
    assert kind is inner.DistributedDataParallel
    assert construct(kind) == ours
assert construct(DDP, device_mesh=None, process_group=dist.group.WORLD) == ours

derived = Derived(nn.Linear(2, 1))
derived(torch.ones(1, 2)).sum().backward()
assert derived.in_features == 2
assert Derived.__mro__[1].__module__ == ours
assert nn.parallel.DistributedDataParallel in Derived.__mro__
for wrapped in (derived, DDP(nn.Linear(2, 1))):
    assert type(copy.deepcopy(wrapped)) is type(wrapped)
    file = io.BytesIO()
    torch.save(wrapped, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is type(wrapped)
assert type(pickle.loads(pickle.dumps(wrapped.module))) is nn.Linear

# Groups of Gloo stay, with torch's class on them. Without a GPU, those of NCCL are ours.
gloo = dist.new_group(backend="gloo")
assert gloo.name() == "gloo"
assert construct(DDP, process_group=gloo) == "torch.nn.parallel.distributed"
if not torch.cuda.is_available():
    for named in ("nccl", "cpu:gloo,cuda:nccl"):
        group = dist.new_group(backend=named)
        assert (dist.get_backend(group), mpiddp.get_backend(group)) == (named, "mpiddp")
assert mpiddp.get_backend(gloo) == "gloo"
assert mpiddp.get_backend(dist.new_group()) == "mpiddp"
assert mpiddp.get_backend(init_device_mesh("cpu", (1,)).get_group()) == "mpiddp"
dist.destroy_process_group()

for backend in ("nccl", "gloo", "cpu:gloo,cuda:nccl", dist.Backend.GLOO, "mpi", "mpiddp"):
    dist.init_process_group(backend, rank=int(os.environ["RANK"]), world_size=1)
    assert (dist.get_backend(), mpiddp.get_backend()) == (backend, "mpiddp")
    dist.destroy_process_group()
dist.init_process_group("fake", rank=0, world_size=4)
assert dist.get_backend() == "fake"
dist.destroy_process_group()

assert dist.is_torchelastic_launched()
print("all well")

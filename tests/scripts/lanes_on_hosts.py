"""Large collectives of ranks on several hosts: in lanes, and as on Gloo.

    mpirun -n 4 python lanes_on_hosts.py

Each rank prints how many results it has compared, and whether there are lanes.
"""

import json
import random
from typing import Any

import torch
import torch.distributed as dist

import mpiddp
from mpiddp.collectives import way_table

ROUNDS = 6

torch.set_num_threads(1)
mpiddp.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
world: Any = dist.group.WORLD
gloo = dist.new_group(backend="gloo")
draw = random.Random(7)  # the same on all ranks
compared = 0
for name in way_table.lanes_from():  # the same with every MPI
    way_table.lanes_from()[name] = 1 << 20
for number in range(ROUNDS):
    count, root = draw.randrange(300_000, 3_000_000), draw.randrange(size)
    torch.manual_seed(number * size + rank)
    own = torch.randint(-50, 50, (count,)).float()
    whole = torch.randint(-50, 50, (count * size,)).float()
    results = []
    for group in (world, gloo):
        total, sent = own.clone(), own.clone()
        rows = [torch.empty(count) for _ in range(size)]
        part, parts = torch.empty(count), whole.clone()
        works: list[Any] = [
            dist.all_reduce(total, group=group, async_op=True),
            dist.broadcast(sent, root, group=group, async_op=True),
            dist.all_gather(rows, own, group=group, async_op=True),
        ]
        if group is world:
            works.append(dist.reduce_scatter(part, list(parts.split(count)), group=group))
        else:  # which has no reduce_scatter of lists
            works.append(dist.all_reduce(parts, group=group, async_op=True))
            works[-1].wait()
            part = parts.split(count)[rank]
        for work in works:
            if work is not None:
                work.wait()
        results.append([total, sent, *rows, part])
    for ours, right in zip(*results, strict=True):
        assert torch.equal(ours, right)
        compared += 1
told = {"rank": rank, "compared": compared, "lanes": world.state.lanes is not None}
print(json.dumps(told) + "\n", end="", flush=True)
mpiddp.destroy_process_group()

"""A NodeOptimizer on hosts that share no memory, with two ranks each."""

import json

import pytest
from slurm_lab import start_hosts

pytestmark = [pytest.mark.timeout(250), pytest.mark.slow]

SCRIPT = """
import hashlib, json, socket
import torch
import mpiddp
from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer

mpiddp.init_process_group()
rank = torch.distributed.get_rank()

def make(**arguments):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 3)]
    return DDP(torch.nn.Sequential(*layers), **arguments)

def train(model, optimizer):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 300, generator=generator)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

plain = make()
shared = make(shared_parameters=True)
expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
found = train(shared, NodeOptimizer(shared, torch.optim.AdamW, lr=0.01))
print(json.dumps({
    "host": socket.gethostname(),
    "bits": hashlib.sha256(found.numpy().tobytes()).hexdigest(),
    "difference": (found - expected).abs().max().item(),
    "moved": (found - torch.nn.utils.parameters_to_vector(make().parameters())).abs().max().item(),
}), flush=True)
mpiddp.destroy_process_group()
"""


def test_all_hosts_have_the_same_bits() -> None:
    with start_hosts(2) as hosts:
        script = hosts.folder / "script.py"
        script.write_text(SCRIPT)
        done = hosts.srun(str(script))
    assert done.returncode == 0
    ended = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(each["host"] for each in ended) == ["node1", "node1", "node2", "node2"]
    assert len({each["bits"] for each in ended}) == 1
    assert all(each["moved"] > 0.01 for each in ended)
    assert all(each["difference"] < 1e-6 for each in ended)

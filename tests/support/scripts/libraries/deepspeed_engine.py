"""Training with DeepSpeed's engines on CPUs, as for torchrun.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_engine.py FOLDER CASE ...

Nothing in it knows of MPI. Each rank prints a line of JSON for each case. The folder is shared.
"""

import json
import os
import sys

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.utils.data import TensorDataset


def data():
    points = torch.rand(48, 16, generator=torch.Generator().manual_seed(5))
    return TensorDataset(points, points.sum(1, keepdim=True))


def config(**options):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000,
        **options,
    }


def optimizer(parameters):
    # torch's: DeepSpeed's own is compiled when it is first used.
    return torch.optim.AdamW(parameters, lr=1e-2)


def step(engine, points, targets):
    loss = nn.functional.mse_loss(engine(points).float(), targets)
    engine.backward(loss)
    engine.step()
    return loss.item()


def plain_model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    )


def start(model, options):
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer(model.parameters()),
        training_data=data(),
        config=config(**options),
    )
    return engine, loader


def zero(folder, stage, **options):
    """Train, write a checkpoint, and train on from it with a new engine."""
    options |= {"zero_optimization": {"stage": stage, "reduce_bucket_size": 600}}
    dtype = torch.bfloat16 if "bf16" in options else torch.float
    engine, loader = start(plain_model(), options)
    losses = [step(engine, points.to(dtype), targets) for points, targets in loader]
    engine.save_checkpoint(folder, tag="half")
    losses += [step(engine, points.to(dtype), targets) for points, targets in loader]
    again, loader = start(plain_model(), options)
    again.load_checkpoint(folder, tag="half")
    # The loader's order changes with its epoch.
    iter(loader)
    losses += [step(again, points.to(dtype), targets) for points, targets in loader]
    return {"losses": losses, "sum": total(again)}


def total(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return sum(p.detach().double().abs().sum().item() for p in engine.module.parameters())


def pipeline(folder):
    """Two stages of one rank each."""
    torch.manual_seed(1)
    model = PipelineModule(
        layers=[
            LayerSpec(nn.Linear, 16, 32),
            nn.functional.relu,
            LayerSpec(nn.Linear, 32, 32),
            nn.functional.relu,
            LayerSpec(nn.Linear, 32, 1),
        ],
        num_stages=2,
        loss_fn=nn.functional.mse_loss,
        partition_method="parameters",
    )
    engine, _ = start(model, {})
    losses = [engine.train_batch().item() for _ in range(3)]
    engine.save_checkpoint(folder, tag="half")
    losses += [engine.train_batch().item() for _ in range(2)]
    engine.load_checkpoint(folder, tag="half")
    losses += [engine.train_batch().item() for _ in range(2)]
    return {"losses": losses, "sum": total(engine)}


class Mixture(nn.Module):
    """A layer whose experts lie on different ranks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.experts = MoE(32, nn.Linear(32, 32), num_experts=2, ep_size=2, k=1, min_capacity=4)
        self.last = nn.Linear(32, 1)

    def forward(self, points):
        out, _, _ = self.experts(self.first(points))
        return self.last(out)


def experts(folder):
    torch.manual_seed(1)
    model = Mixture()
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )
    engine, _, loader, _ = deepspeed.initialize(
        model=model, optimizer=optimizer(groups), training_data=data(), config=config()
    )
    losses = [step(engine, points, targets) for _ in range(2) for points, targets in loader]
    engine.save_checkpoint(folder, tag="end")
    engine.load_checkpoint(folder, tag="end")
    losses += [step(engine, points, targets) for points, targets in loader]
    return {"losses": losses, "sum": total(engine)}


CASES = {
    **{f"zero{stage}": (lambda folder, stage=stage: zero(folder, stage)) for stage in range(4)},
    "bf16": lambda folder: zero(folder, 2, bf16={"enabled": True}),
    "pipeline": pipeline,
    "experts": experts,
}


def main(folder, *cases):
    deepspeed.init_distributed(dist_backend="gloo")
    for case in cases:
        said = CASES[case](os.path.join(folder, case))
        place = {
            "case": case,
            "rank": torch.distributed.get_rank(),
            "world": torch.distributed.get_world_size(),
            "backend": torch.distributed.get_backend(),
        }
        print(json.dumps(place | said), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

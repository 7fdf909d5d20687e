"""Training with Hugging Face Accelerate, as for torchrun: nothing in it knows of MPI.

torchrun --nproc-per-node 2 accelerate_trainer.py FOLDER

With a second argument it names the backend itself: mpirun -n 2 python accelerate_trainer.py FOLDER
mpiddp
"""

import json
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def loader(size, seed):
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(size, 20, generator=generator)
    return DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), 4)


def main(folder, backend=None):
    if backend is not None:
        # Accelerate takes the group that it finds; it refuses names that it does not know.
        import mpiddp  # noqa: F401

        torch.distributed.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model, optimizer, scheduler, training, validation = accelerator.prepare(
        model, optimizer, scheduler, loader(64, 5), loader(30, 6)
    )
    losses = []
    for _ in range(2):
        for points, targets in training:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(points), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
    seen = []
    with torch.no_grad():
        for points, targets in validation:
            _, all_targets = accelerator.gather_for_metrics((model(points), targets))
            seen += all_targets.flatten().tolist()
    rank = accelerator.process_index
    uneven = torch.full((rank + 1,), float(rank))
    padded = accelerator.gather(accelerator.pad_across_processes(uneven, pad_index=-1))
    objects = accelerator.gather_for_metrics([{"rank": rank}], use_gather_object=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(os.path.join(folder, "state"), safe_serialization=False)
    accelerator.wait_for_everyone()
    accelerator.load_state(os.path.join(folder, "state"))
    with accelerator.main_process_first():
        pass
    print(json.dumps({
        "rank": rank,
        "world": accelerator.num_processes,
        "kind": str(accelerator.distributed_type),
        "backend": torch.distributed.get_backend(),
        "ddp": type(model).__module__,
        "losses": losses,
        "seen": seen,
        "padded": padded.tolist(),
        "objects": objects,
    }))  # fmt: skip
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(folder, "end.pt"))
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Lightning with averages of weights: SWA and an exponential moving average.

torchrun --nproc-per-node 2 lightning_averages.py FOLDER
"""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from reporting import Report
from torch import nn


class Net(lightning.LightningModule):
    def __init__(self, report):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
        self.report = report

    def training_step(self, batch, index):
        points, targets = batch
        loss = nn.functional.mse_loss(self.net(points), targets)
        self.log("loss", loss, sync_dist=True)
        self.report.step(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


points = torch.randn(256, 20, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(points, points.sum(1, keepdim=True))
here, nodes = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ.get("GROUP_WORLD_SIZE", 1))
for case, callback in (
    ("SWA", StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=0.5)),
    ("EMA", EMAWeightAveraging(decay=0.9)),
):
    lightning.seed_everything(0, verbose=False)
    report = Report(f"Lightning, {case}")
    model = Net(report)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=here, num_nodes=nodes, strategy="ddp", max_epochs=4,
        callbacks=[callback], enable_progress_bar=False, enable_model_summary=False, logger=False,
        enable_checkpointing=False, default_root_dir=sys.argv[1],
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=16))
    sums = sum(p.detach().double().sum().item() for p in model.parameters())
    report.say(trainer.strategy.model or model, sums=sums)
torch.distributed.destroy_process_group()

"""Training with PyTorch Lightning, as for torchrun: nothing in it knows of MPI.

torchrun --nproc-per-node 2 lightning_trainer.py FOLDER

With a second argument it names the backend itself: mpirun -n 2 python lightning_trainer.py FOLDER
mpiddp
"""

import json
import os
import sys

import torch
import torchmetrics
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(20, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        )
        self.error = torchmetrics.MeanSquaredError()
        self.seen = torchmetrics.CatMetric()

    def training_step(self, batch, index):
        points, targets = batch
        return torch.nn.functional.mse_loss(self.net(points), targets)

    def validation_step(self, batch, index):
        points, targets = batch
        predicted = self.net(points)
        self.error.update(predicted, targets)
        self.seen.update(points[:, 0])
        self.log("error", self.error)
        loss = torch.nn.functional.mse_loss(predicted, targets)
        self.log("mean of ranks", loss, sync_dist=True)
        self.log("sum of ranks", loss, sync_dist=True, reduce_fx="sum")

    def on_train_end(self):
        self.report["ddp"] = type(self.trainer.model).__module__

    def on_validation_epoch_end(self):
        ranks = self.all_gather(torch.tensor(self.global_rank))
        self.report = {"ranks": ranks.tolist(), "seen": sorted(self.seen.compute().tolist())}
        self.seen.reset()

    def predict_step(self, batch, index):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def loader(size, seed):
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(size, 20, generator=generator)
    return DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), 8)


def main(folder, backend=None):
    strategy = "ddp"
    if backend is not None:
        import mpiddp  # noqa: F401

        strategy = DDPStrategy(process_group_backend=backend)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=3,
        default_root_dir=folder,
        callbacks=[
            ModelCheckpoint(folder, filename="last", monitor="error"),
            EarlyStopping("error", patience=3),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    model = Regression()
    trainer.fit(model, loader(64, 5), loader(32, 6))
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted = trainer.predict(model, loader(32, 6), return_predictions=True)
    trainer.save_checkpoint(os.path.join(folder, "end.ckpt"))
    print(json.dumps({
        "rank": trainer.global_rank,
        "world": trainer.world_size,
        "backend": torch.distributed.get_backend(),
        "metrics": fitted,
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "predicted": len(predicted),
        **model.report,
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])

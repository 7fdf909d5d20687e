"""Composer's Trainer, which compares the backend's name with the one that its device asks for.

torchrun --nproc-per-node 2 composer_classifier.py FOLDER
"""

import sys

import declared_operators

declared_operators.declare()

import torch  # noqa: E402
from composer import Callback, Trainer  # noqa: E402
from composer.models import ComposerClassifier  # noqa: E402
from composer.utils import dist  # noqa: E402
from reporting import Report  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402


class Losses(Callback):
    def __init__(self, report):
        self.report = report

    def batch_end(self, state, logger):
        self.report.step(state.loss.item())


dist.initialize_dist("cpu", timeout=60)
rank = dist.get_global_rank()
points = torch.randn(128, 16, generator=torch.Generator().manual_seed(0))
data = TensorDataset(points, (points.sum(1) > 0).long())
loader = DataLoader(data, batch_size=8, sampler=dist.get_sampler(data, shuffle=True))
report = Report("Composer")
torch.manual_seed(rank)
layers = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
model = ComposerClassifier(layers, num_classes=2)
trainer = Trainer(
    model=model, train_dataloader=loader, eval_dataloader=loader, max_duration="3ep",
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), device="cpu", seed=1,
    callbacks=[Losses(report)], save_folder=sys.argv[1], dist_timeout=60, progress_bar=False,
)  # fmt: skip
trainer.fit()
said = {
    "sums": sum(p.detach().double().sum().item() for p in model.parameters()),
    "accuracy": trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute().item(),
    "gathered": dist.all_gather_object({"rank": rank}),
}
report.say(trainer.state.model, **said)
trainer.close()

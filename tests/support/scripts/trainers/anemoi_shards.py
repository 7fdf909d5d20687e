"""anemoi: a transformer sharded over the ranks of a model, with the strategy of its training.

torchrun --nproc-per-node 2 anemoi_shards.py FOLDER
"""

import os
import sys

import pytorch_lightning as lightning
import torch
import torch.distributed as dist
from anemoi.models.distributed.graph import gather_tensor, reduce_tensor, shard_tensor
from anemoi.models.distributed.shapes import get_shard_shapes
from anemoi.models.layers.attention import MultiHeadSelfAttention
from anemoi.models.layers.utils import load_layer_kernels
from anemoi.training.distributed.strategy import DDPGroupStrategy
from reporting import Report
from torch import nn

POINTS, WIDTH = 17, 24  # so shards differ in size


class Fields(torch.utils.data.Dataset):
    def set_comm_group_info(self, rank, group, *more):
        self.group = group

    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(100 * self.group + index)
        return torch.randn(POINTS, WIDTH, generator=generator)


class Net(lightning.LightningModule):
    def __init__(self, report):
        super().__init__()
        self.shard_shapes = {}
        self.report = report
        self.attention = MultiHeadSelfAttention(
            4, WIDTH, load_layer_kernels(), attention_implementation="scaled_dot_product_attention"
        )
        self.trainable = nn.Parameter(torch.zeros(POINTS, WIDTH))

    def set_model_comm_group(self, group, *more):
        self.group = group

    def set_reader_groups(self, *more):
        pass

    def training_step(self, batch, index):
        whole = batch[0] + self.trainable
        shapes = get_shard_shapes(whole, 0, self.group)
        part = shard_tensor(whole, 0, shapes, self.group)
        part = part + self.attention(part, shapes, 1, self.group)
        columns = get_shard_shapes(whole.t(), 1, self.group)
        back = gather_tensor(part.t().contiguous(), 1, columns, self.group)
        total = reduce_tensor(part.square().sum(), self.group)
        loss = (back.t() - batch[0].roll(1, 0)).square().mean() + 1e-4 * total
        self.report.step(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


ranks = int(os.environ["WORLD_SIZE"])
for sharded in (2, 1):
    report = Report(f"anemoi, {sharded} ranks a model")
    lightning.seed_everything(0, verbose=False)
    model = Net(report)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        strategy=DDPGroupStrategy(num_gpus_per_model=sharded, read_group_size=1),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=sys.argv[1],
    )
    trainer.fit(model, torch.utils.data.DataLoader(Fields(), batch_size=1))
    sums = sum(p.detach().double().sum().item() for p in model.parameters())
    report.say(trainer.strategy.model, sums=sums, group=dist.get_backend(model.group))
    del trainer
dist.destroy_process_group()

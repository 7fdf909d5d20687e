"""NequIP's own training by a configuration, with the gradients that its strategy reduces itself.

torchrun --nproc-per-node 2 nequip_potential.py FOLDER (simple | ddp)
"""

import os
import sys
from pathlib import Path

import lightning
import numpy
import torch.distributed as dist
from ase import Atoms
from ase.calculators.lj import LennardJones
from ase.io import write
from nequip.scripts.train import main as train
from reporting import Report

CONFIG = """
run: [train]
cutoff: 4.0
data:
  _target_: nequip.data.datamodule.ASEDataModule
  seed: 1
  split_dataset:
    file_path: FOLDER/atoms.xyz
    train: 24
    val: 8
  transforms:
    - _target_: nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper
      model_type_names: [Ar, Ne]
    - _target_: nequip.data.transforms.NeighborListTransform
      r_max: 4.0
  train_dataloader: {_target_: torch.utils.data.DataLoader, batch_size: 2, shuffle: true}
  val_dataloader: {_target_: torch.utils.data.DataLoader, batch_size: 2}
  stats_manager:
    _target_: nequip.data.CommonDataStatisticsManager
    type_names: [Ar, Ne]
trainer:
  _target_: lightning.Trainer
  accelerator: cpu
  devices: 2
  max_epochs: 3
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: FOLDER
  strategy: STRATEGY
  callbacks:
    - _target_: __main__.Losses
training_module:
  _target_: nequip.train.EMALightningModule
  ema_decay: 0.9
  loss:
    _target_: nequip.train.EnergyForceLoss
    coeffs: {total_energy: 1.0, forces: 1.0}
  val_metrics:
    _target_: nequip.train.EnergyForceMetrics
    coeffs: {total_energy_mae: 1.0, forces_mae: 1.0}
  optimizer: {_target_: torch.optim.Adam, lr: 0.01}
  model:
    _target_: nequip.model.NequIPGNNModel
    seed: 1
    model_dtype: float32
    type_names: [Ar, Ne]
    r_max: 4.0
    num_layers: 2
    l_max: 1
    num_features: 8
    avg_num_neighbors: 8.0
"""


class Losses(lightning.Callback):
    """Notes what a training step returns, and says it at the end."""

    def setup(self, trainer, module, stage):
        self.report = Report(f"NequIP, {type(trainer.strategy).__name__}")

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.report.step(outputs["loss"].item())

    def on_train_end(self, trainer, module):
        sums = sum(p.detach().double().sum().item() for p in module.parameters())
        self.report.say(trainer.strategy.model, sums=sums)


def main():
    folder = Path(sys.argv[1]) / os.environ["RANK"]
    folder.mkdir(exist_ok=True)
    generator = numpy.random.default_rng(0)
    images = []
    for number in range(32):
        count = 4 + number % 3  # so batches differ in size between ranks
        grid = 1.2 * numpy.array([[i // 4, i // 2 % 2, i % 2] for i in range(count)])
        places = grid + generator.normal(scale=0.1, size=grid.shape)
        atoms = Atoms("ArNe" * (count // 2) + "Ar" * (count % 2), places)
        atoms.calc = LennardJones(rc=4.0)
        atoms.get_potential_energy()
        atoms.get_forces()
        images.append(atoms)
    # By default ASE writes on rank 0 of MPI alone, once mpi4py is there.
    write(folder / "atoms.xyz", images, parallel=False)
    strategy = {"ddp": "ddp", "simple": "{_target_: nequip.train.SimpleDDPStrategy}"}[sys.argv[2]]
    text = CONFIG.replace("FOLDER", str(folder)).replace("STRATEGY", strategy)
    (folder / "training.yaml").write_text(text)
    sys.argv = ["nequip-train", "-cp", str(folder), "-cn", "training", f"hydra.run.dir={folder}"]
    train()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

"""sentence-transformers' trainer, with plain and with cached gradients of large batches.

torchrun --nproc-per-node 2 sentence_pairs.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from reporting import WORDS, Report
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast, TrainerCallback

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])


def make_model():
    own = folder / f"bert-{rank}"
    own.mkdir(exist_ok=True)
    vocabulary = own / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = BertTokenizerFast(str(vocabulary))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(own)
    tokenizer.save_pretrained(own)
    transformer = Transformer(str(own))
    return SentenceTransformer(modules=[transformer, Pooling(64)], device="cpu")


def sentence(seed):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[int(i)] for i in torch.randint(0, len(WORDS), (8,), generator=generator))


class Losses(TrainerCallback):
    def __init__(self, report):
        self.report = report

    def on_log(self, args, state, control, logs=None, **more):
        if "loss" in logs:
            self.report.step(logs["loss"])


pairs = {
    "anchor": [sentence(i) for i in range(128)],
    "positive": [sentence(i + 1000) for i in range(128)],
}
for case, make_loss in (
    ("plain", MultipleNegativesRankingLoss),
    ("cached", lambda model: CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)),
):
    model = make_model()
    report = Report(f"sentence-transformers, {case}")
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / case), use_cpu=True, per_device_train_batch_size=8,
        num_train_epochs=1, logging_steps=1, save_strategy="no", report_to=[], seed=1,
        learning_rate=1e-3, disable_tqdm=True, ddp_find_unused_parameters=True,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict(pairs),
        loss=make_loss(model), callbacks=[Losses(report)],
    )  # fmt: skip
    trainer.train()
    sums = [sum(p.detach().double().sum().item() for p in model.parameters())]
    report.say(trainer.model_wrapped, sums=sums)
    trainer.accelerator.free_memory()
dist.destroy_process_group()

"""TRL's SFTTrainer with an adapter of PEFT, and Transformers' Trainer with one.

torchrun --nproc-per-node 2 language_adapters.py FOLDER
"""

import sys

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from reporting import WORDS, Report
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

SETTINGS = {
    "use_cpu": True, "per_device_train_batch_size": 4, "max_steps": 10, "logging_steps": 1,
    "save_strategy": "no", "report_to": [], "seed": 1, "learning_rate": 1e-2, "disable_tqdm": True,
    "ddp_find_unused_parameters": False, "bf16": False, "gradient_checkpointing": False,
}  # fmt: skip
ADAPTER = LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.0, task_type="CAUSAL_LM")


class Losses(TrainerCallback):
    def __init__(self, report):
        self.report = report

    def on_log(self, args, state, control, logs=None, **more):
        if "loss" in logs:
            self.report.step(logs["loss"])


def make_model():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(WORDS) + 3, n_positions=32, n_embd=64, n_layer=2, n_head=2, embd_pdrop=0.0,
        resid_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_tokenizer():
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "[END]", "[PAD]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[END]", pad_token="[PAD]"
    )


def say(trainer, report):
    named = trainer.model.named_parameters()
    sums = sum(p.detach().double().sum().item() for name, p in named if "lora" in name)
    report.say(trainer.model_wrapped, sums=sums)


picked = torch.randint(0, len(WORDS), (64, 12), generator=torch.Generator().manual_seed(0))
texts = [" ".join(WORDS[int(i)] for i in row) for row in picked]
tokens = (picked + 3).tolist()

report = Report("PEFT")
adapted = get_peft_model(make_model(), ADAPTER)
trainer = Trainer(
    adapted, TrainingArguments(f"{sys.argv[1]}/peft", **SETTINGS),
    train_dataset=Dataset.from_dict({"input_ids": tokens, "labels": tokens}),
    callbacks=[Losses(report)],
)  # fmt: skip
trainer.train()
say(trainer, report)
trainer.accelerator.free_memory()

report = Report("TRL")
trainer = SFTTrainer(
    make_model(), args=SFTConfig(f"{sys.argv[1]}/trl", max_length=32, **SETTINGS),
    train_dataset=Dataset.from_dict({"text": texts}), processing_class=make_tokenizer(),
    peft_config=ADAPTER, callbacks=[Losses(report)],
)  # fmt: skip
trainer.train()
say(trainer, report)
dist.destroy_process_group()

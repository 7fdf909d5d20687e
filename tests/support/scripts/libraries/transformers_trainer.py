"""Training with the Trainer of Hugging Face Transformers, as for torchrun.

torchrun --nproc-per-node 2 transformers_trainer.py FOLDER CASE ...

Nothing in it knows of MPI. Each rank prints a line of JSON for each case. The folder is shared.
"""

import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

WORDS, LENGTH = 64, 12


class Sentences(Dataset):
    """Random words, to be classified or continued."""

    def __init__(self, size, seed, classes):
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(WORDS, (size, LENGTH), generator=generator)
        self.classes = classes

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index]
        labels = words[0] % 2 if self.classes else words
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels}


def bert():
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config), True


def gpt2():
    # Its first and last layers are one parameter.
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), False


def bert_with_unused():
    model, classes = bert()
    model.unused = nn.Linear(3, 3)
    return model, classes


# The model, and what TrainingArguments are given besides.
CASES = {
    "bert": (bert, {"eval_strategy": "epoch"}),
    "gpt2": (gpt2, {}),
    "accumulation": (gpt2, {"gradient_accumulation_steps": 2}),
    "unused": (bert_with_unused, {"ddp_find_unused_parameters": True}),
    "bf16": (gpt2, {"bf16": True}),
    "checkpointing": (gpt2, {"gradient_checkpointing": True}),
    "compile": (bert, {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "fsdp": (gpt2, {"fsdp": "full_shard", "fsdp_config": {"version": 2}}),
    "resume": (bert, {"save_strategy": "steps", "save_steps": 3}),
}


def accuracy(predictions):
    return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


def train(folder, case):
    make, options = CASES[case]

    def trainer():
        set_seed(1)
        model, classes = make()
        arguments = TrainingArguments(
            output_dir=os.path.join(folder, case),
            use_cpu=True,
            ddp_backend="gloo",
            num_train_epochs=2,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            learning_rate=1e-2,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            **({"save_strategy": "no"} | options),
        )
        return Trainer(
            model,
            arguments,
            train_dataset=Sentences(32, 1, classes),
            # It does not divide by ranks and batches.
            eval_dataset=Sentences(13, 2, classes),
            compute_metrics=accuracy if classes else None,
        )

    one = trainer()
    one.train()
    if case == "resume":
        one = trainer()
        one.train(resume_from_checkpoint=os.path.join(folder, case, "checkpoint-3"))
    wrapped = getattr(one.model_wrapped, "_orig_mod", one.model_wrapped)  # torch.compile's
    said = {"wrapper": type(wrapped).__module__}
    if case == "bert":
        # Long lines of several ranks mix.
        said |= {"predicted": one.predict(one.eval_dataset).predictions[:, 0].tolist()}
    return said | {
        "losses": [line["loss"] for line in one.state.log_history if "loss" in line],
        "evaluated": [line["eval_loss"] for line in one.state.log_history if "eval_loss" in line],
        "steps": one.state.global_step,
        "sum": sum(p.detach().double().abs().sum().item() for p in one.model.parameters()),
    }


def main(folder, *cases):
    for case in cases:
        said = train(folder, case)
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

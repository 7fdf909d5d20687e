"""A small Llama that libraries divide among the ranks, as for torchrun: it reads, and goes on.

torchrun --nproc-per-node 2 divided_llama.py FOLDER CASE ...

Nothing in it knows of MPI, or names a backend. Each rank prints a line of JSON for each case.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM


def whole():
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


def tp_plan(folder):
    """Transformers' own: it starts torch.distributed for the model that it loads."""
    own = os.path.join(folder, os.environ["RANK"])  # nobody waits for another to have written
    whole().save_pretrained(own)
    return LlamaForCausalLM.from_pretrained(own, tp_plan="auto")


def init_inference(folder):
    """DeepSpeed's, which finds the layers to divide by itself."""
    import deepspeed

    config = {"tensor_parallel": {"tp_size": int(os.environ["WORLD_SIZE"])}, "dtype": "float32"}
    return deepspeed.init_inference(whole(), config=config).module


def held(model):
    parameters = (getattr(each, "_local_tensor", each) for each in model.parameters())
    return sum(each.numel() for each in parameters)


for case in sys.argv[2:]:
    make = {"tp_plan": tp_plan, "init_inference": init_inference}[case]
    model = make(sys.argv[1]).eval()
    text = torch.arange(24).reshape(2, 12) * 5 % 128
    with torch.no_grad():
        scores = model(input_ids=text).logits
        said = model.generate(
            input_ids=text, attention_mask=torch.ones_like(text), max_new_tokens=12,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    torch.testing.assert_close(scores, whole().eval()(input_ids=text).logits)
    assert held(model) < 0.6 * held(whole())
    result = {
        "case": case,
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "backend": dist.get_backend(),
        "losses": scores.mean((0, 1))[:8].tolist(),
        "said": said.flatten().tolist(),
        "held": held(model),
    }
    print(json.dumps(result), flush=True)
dist.destroy_process_group()

"""Makes a random-weight Llama checkpoint with its own byte-level BPE tokenizer, an adapter for it
in PEFT's format and an EAGLE head that drafts for it, offline.

1.4 M parameters, 4,096 tokens, a chat template. The tokenizer is trained on the standard
library's sources, so that nothing is fetched; its merges may differ between Python versions,
which is why scenarios give their prompts as token ids.
"""

import glob
import json
import os
import sys
import sysconfig

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIALS = ["<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
ADAPTED = ["q_proj", "v_proj"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    sources = sorted(glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "*.py")))[:120]
    bpe = Tokenizer(models.BPE(unk_token=None))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train(
        sources,
        trainers.BpeTrainer(
            vocab_size=4096,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|bos|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.float16)


def make_adapter(config: LlamaConfig, base: str, folder: str) -> None:
    """Rank 8 on the queries and values of every layer."""
    torch.manual_seed(1)
    size, rank = config.hidden_size, 8
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name in ADAPTED:
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, size)
            tensors[f"{at}.lora_B.weight"] = torch.randn(size, rank)
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ADAPTED,
    }
    with open(os.path.join(folder, "adapter_config.json"), "w") as out:
        json.dump(settings, out)


def make_draft(base: LlamaConfig, folder: str) -> None:
    """One layer behind a projection of the embedding and the model's hidden state."""
    torch.manual_seed(2)
    config = LlamaConfig(**{**base.to_dict(), "num_hidden_layers": 1})
    head = LlamaForCausalLM(config).to(torch.float16)
    tensors = {
        name.removeprefix("model."): tensor.contiguous()
        for name, tensor in head.state_dict().items()
        if not name.startswith(("lm_head", "model.norm")) and "input_layernorm" not in name
    }
    size = config.hidden_size
    tensors["fc.weight"] = (torch.randn(size, 2 * size) * 0.02).to(torch.float16)
    os.makedirs(folder, exist_ok=True)
    head.config.save_pretrained(folder)
    save_file(tensors, os.path.join(folder, "model.safetensors"))


def main(folder: str, adapter: str, draft: str) -> None:
    os.makedirs(folder, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    model = make_model(tokenizer)
    model.save_pretrained(folder)
    make_adapter(model.config, folder, adapter)
    make_draft(model.config, draft)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Makes a Llama target and an MLA drafter of random weights, as small as the lab's pair and fitting it.

<engine's python> probe/tests/make_pairs.py lab/models DIRECTORY
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 5
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
LAYERS = [3, 5, 7]


def llama(models: Path, directory: Path) -> None:
    """A Llama of eight layers with the lab's tokenizer, as wide as the lab's target."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,  # large, so that its answers depend on what it is asked
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    for name in TOKENIZER:
        shutil.copy(models / "target" / name, directory / name)


def mla(models: Path, directory: Path) -> None:
    """A drafter of the class Eagle3DeepseekV2ForCausalLM for the lab's target."""
    torch.manual_seed(SEED)
    text = json.loads((models / "target" / "config.json").read_text(encoding="utf-8"))["text_config"]
    width, heads, vocabulary = text["hidden_size"], text["num_attention_heads"], text["vocab_size"]
    rope, nope, value = text["qk_rope_head_dim"], text["qk_nope_head_dim"], text["v_head_dim"]
    query, latent, middle = text["q_lora_rank"], text["kv_lora_rank"], text["intermediate_size"]
    config = {
        **text,
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "num_hidden_layers": 1,
        "draft_vocab_size": vocabulary,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS, "use_aux_hidden_state": True},
    }
    attention = "layers.0.self_attn"
    shapes = {
        "fc.weight": (width, len(LAYERS) * width),
        f"{attention}.q_a_proj.weight": (query, 2 * width),
        f"{attention}.kv_a_proj_with_mqa.weight": (latent + rope, 2 * width),
        f"{attention}.q_b_proj.weight": (heads * (nope + rope), query),
        f"{attention}.kv_b_proj.weight": (heads * (nope + value), latent),
        f"{attention}.o_proj.weight": (width, heads * value),
        "layers.0.mlp.gate_proj.weight": (middle, width),
        "layers.0.mlp.up_proj.weight": (middle, width),
        "layers.0.mlp.down_proj.weight": (width, middle),
        "lm_head.weight": (vocabulary, width),
    }
    tensors = {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    sizes = {
        f"{attention}.q_a_layernorm": query,
        f"{attention}.kv_a_layernorm": latent,
        "layers.0.input_layernorm": width,
        "layers.0.hidden_norm": width,
        "layers.0.post_attention_layernorm": width,
        "norm": width,
    }
    tensors |= {f"{name}.weight": torch.ones(size) for name, size in sizes.items()}
    directory.mkdir(parents=True)
    save_file(tensors, str(directory / "model.safetensors"), {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


if __name__ == "__main__":
    llama(Path(sys.argv[1]), Path(sys.argv[2]) / "llama")
    mla(Path(sys.argv[1]), Path(sys.argv[2]) / "mla")

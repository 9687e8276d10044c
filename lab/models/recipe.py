"""What the scripts of this directory share: sizes, layer ids and seeds of the tiny pair, and the bf16 export."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGET = HERE / "target"
DRAFTER = HERE / "drafter"
PROMPTS = HERE / "prompts.json"
FIGURES = HERE / "figures.json"

VOCABULARY = 1024
DRAFT_VOCABULARY = 512
HIDDEN = 96
LAYERS = 8
PAD, BOS, EOS, MEDIA = 0, 1, 2, 3
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<media>"]
CONTEXT = 2048

# The drafter is trained on the INPUT of these layers. SGLang 0.5.23 would take [2, n // 2, n - 3] = [2, 4, 5] without
# a setting, and shifts a list by one when it starts with 1: these ids differ from the default in every place and are
# taken as they stand, so a lost or shifted setting shows in the accept length.
AUX_LAYERS = [3, 5, 7]

SEED = 20
NEW_TOKENS = 64
DRAFT_STEPS = 3

TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    # SGLang's DeepSeek class asks for yarn on the CPU
    "rope_scaling": {
        "type": "yarn",
        "factor": 2.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": CONTEXT // 2,
    },
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "torch_dtype": "float32",
    "num_nextn_predict_layers": 0,
}

# The checkpoint carries no vision weights; the tower is as small as the class allows.
VISION_CONFIG: dict[str, Any] = {
    "patch_size": 14,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "init_pos_emb_time": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 1,
    "vt_hidden_size": 32,
    "vt_intermediate_size": 64,
    "mm_hidden_size": 32,
    "text_hidden_size": HIDDEN,
    "merge_kernel_size": [2, 2],
}

TARGET_CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": TEXT_CONFIG,
    "vision_config": VISION_CONFIG,
    "torch_dtype": "float32",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "media_placeholder_token_id": MEDIA,
    "tie_word_embeddings": False,
}

DRAFTER_HEADS, DRAFTER_KV_HEADS, DRAFTER_HEAD_DIM, DRAFTER_MLP = 4, 4, 24, 384

DRAFTER_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": DRAFTER_MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": DRAFTER_HEADS,
    "num_key_value_heads": DRAFTER_KV_HEADS,
    "head_dim": DRAFTER_HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": DRAFT_VOCABULARY,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "torch_dtype": "float32",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX_LAYERS, "use_aux_hidden_state": True},
}


def write_json(path: Path, data: object) -> None:
    """Write JSON the way every file of this directory is kept: indented by one, newline at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file; errors are those of `open` and `json`."""
    return json.loads(path.read_text(encoding="utf-8"))


def update_figures(section: str, data: dict[str, Any], path: Path = FIGURES) -> None:
    """Replace one section of figures.json, which names the script that measured it, and keep the others."""
    figures = read_json(path) if path.exists() else {"format": 1}
    figures[section] = {"written_by": Path(sys.argv[0]).name, **data}
    write_json(path, figures)

"""SGLang's drafter classes of EAGLE-3, each with what it has of its own."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Dict, Mapping, Sequence, Tuple, Type

import torch

from whatif.drafter import Drafter, Past
from whatif.files import Failed, Json, Target, read_config
from whatif.rope import Rotation, rope_settings, rotate, yarn_size


class Llama(Drafter):
    """`LlamaForCausalLMEagle3` (models/llama_eagle3.py): attention whose heads share keys in groups."""

    LEGACY: ClassVar[Mapping[str, str]] = {
        **Drafter.LEGACY,
        "aux_norm_low": "fc_norm.0",
        "aux_norm_mid": "fc_norm.1",
        "aux_norm_high": "fc_norm.2",
    }
    FUSED: ClassVar[Mapping[str, Tuple[str, ...]]] = {**Drafter.FUSED, "qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def _prepare(self) -> None:
        config = self.config
        eagle = config.get("eagle_config") or {}
        self.norm_before_fc = bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False)))
        self.heads = int(config["num_attention_heads"])
        self.groups = int(config.get("num_key_value_heads") or self.heads)
        self.size = int(config.get("head_dim") or self.width // self.heads)
        self.rotary, self.scale = self.size, self.size**-0.5
        self.turn_as(config)

    def rope_of(self, config: Json) -> Json:
        """As SGLang\'s ordinary attention reads them."""
        return rope_settings(config)

    def _states_of_fc(self) -> int:
        given = self.config.get("num_aux_hidden_states")
        ids = (self.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        return int(given) if given is not None else len(ids) if ids else 3

    def _projections(self, layer: int) -> Dict[str, bool]:
        names = {f"{part}_proj.weight": True for part in "qkvo"}
        bias = self.config.get("attention_bias") or self.config.get("bias")
        return {**names, "o_proj.bias": True} if bias else names

    def _more_names(self) -> Dict[str, bool]:
        return {"input_norm.weight": True} if self.norm_before_fc else {}

    def _norm_width(self, name: str) -> int:
        return self.wide * self.count if name == "input_norm.weight" else super()._norm_width(name)

    def _split(self, fused: str, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        if fused != "qkv_proj":
            return super()._split(fused, tensor)
        return tensor.split([self.heads * self.size, self.groups * self.size, self.groups * self.size])

    def _join(self, states: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not self.norm_before_fc:
            return states
        return self.norm("input_norm.weight", torch.cat(list(states), -1)).split(states[0].shape[-1], -1)

    def _part(self, layer: int, part: str, x: torch.Tensor) -> torch.Tensor:
        projected = x @ self.weights[f"layers.{layer}.self_attn.{part}_proj.weight"].T
        return projected.view(len(x), -1, self.size).transpose(0, 1)

    def _query(self, layer: int, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return rotate(self._part(layer, "q", x), rotation, bool(self.rotation_settings["neox"]))

    def _keys_values(self, layer: int, x: torch.Tensor, rotation: Rotation) -> Past:
        keys = rotate(self._part(layer, "k", x), rotation, bool(self.rotation_settings["neox"]))
        return keys, self._part(layer, "v", x)


class LatentAttention(Drafter):
    """`Eagle3DeepseekV2ForCausalLM` (models/kimi_k25_eagle3.py): DeepSeek's multi-head latent attention, one layer."""

    HEAD_OF_TARGET_FIRST: ClassVar[bool] = True

    def _prepare(self) -> None:
        config = self.config
        if config.get("q_lora_rank") is None:
            raise Failed(
                "the drafter's config.json has no q_lora_rank, without which the engine's class does not start"
            )
        if self.depth != 1:
            raise Failed(f"the drafter has {self.depth} layers, the engine's class for its attention takes one")
        if config.get("tie_word_embeddings"):
            raise Failed(
                "the drafter's head is tied to its embedding (tie_word_embeddings), which is not computed here"
            )
        self.heads, self.latent = int(config["num_attention_heads"]), int(config["kv_lora_rank"])
        self.plain, self.rotary = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
        self.value = int(config["v_head_dim"])
        self.turn_as(config)

    def rope_of(self, config: Json) -> Json:
        """As SGLang's latent attention reads them."""
        return rope_settings(config, latent=True)

    def turn_as(self, config: Json) -> None:
        """YaRN scales the attention too."""
        super().turn_as(config)
        scaling = self.rotation_settings["scaling"]
        self.scale = (self.plain + self.rotary) ** -0.5
        if scaling and scaling.get("apply_yarn_scaling", True) and scaling.get("apply_scale", True):
            factor = float(scaling.get("factor") or 1.0)
            self.scale *= yarn_size(factor, float(scaling.get("mscale_all_dim") or 0)) ** 2

    def _states_of_fc(self) -> int:
        key = "eagle_aux_hidden_state_layer_ids"
        ids = (self.config.get("eagle_config") or {}).get(key)
        ids = self.config.get(key) if ids is None else ids
        return 3 if ids is None else len(ids)

    def _projections(self, layer: int) -> Dict[str, bool]:
        parts = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_layernorm", "kv_a_layernorm")
        return {f"{part}.weight": True for part in parts}

    def _norm_width(self, name: str) -> int:
        if name.endswith("q_a_layernorm.weight"):
            return int(self.config["q_lora_rank"])
        return self.latent if name.endswith("kv_a_layernorm.weight") else super()._norm_width(name)

    def _rotated(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        plain, turned = x.split([self.plain, self.rotary], -1)
        return torch.cat([plain, rotate(turned, rotation, bool(self.rotation_settings["neox"]))], -1)

    def _query(self, layer: int, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        start = f"layers.{layer}.self_attn."
        low = self.norm(start + "q_a_layernorm.weight", x @ self.weights[start + "q_a_proj.weight"].T)
        query = (low @ self.weights[start + "q_b_proj.weight"].T).view(len(x), self.heads, -1).transpose(0, 1)
        return self._rotated(query, rotation)

    def _keys_values(self, layer: int, x: torch.Tensor, rotation: Rotation) -> Past:
        start = f"layers.{layer}.self_attn."
        both = x @ self.weights[start + "kv_a_proj_with_mqa.weight"].T
        latent, shared = both.split([self.latent, self.rotary], -1)
        latent = self.norm(start + "kv_a_layernorm.weight", latent)
        spread = (latent @ self.weights[start + "kv_b_proj.weight"].T).view(len(x), self.heads, -1).transpose(0, 1)
        plain, values = spread.split([self.plain, self.value], -1)
        keys = torch.cat([plain, shared.expand(self.heads, -1, -1)], -1)
        return self._rotated(keys, rotation), values


CLASSES: Dict[str, Type[Drafter]] = {
    "LlamaForCausalLMEagle3": Llama,
    "Eagle3DeepseekV2ForCausalLM": LatentAttention,
}


def open_drafter(directory: Path, target: Target, device: str) -> Drafter:
    """The drafter of a directory, as its config.json names its class; Failed when that is none of these."""
    named = (read_config(directory).get("architectures") or ["none"])[0]
    if named not in CLASSES:
        raise Failed(f"{directory}/config.json names the class {named}; this program computes {', '.join(CLASSES)}")
    return CLASSES[named](directory, target, device)

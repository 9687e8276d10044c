"""Checks the what-if's evaluator, the package beside it, with the engine's interpreter. Prints what held.

Two things stand in for the evaluator's own arithmetic: a drafter written once more, one row at a time and with no
cache; and SGLang's own rotary embeddings.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from whatif.classes import open_drafter
from whatif.drafting import Replayed, accept, draft, fed_states
from whatif.files import Failed, Target
from whatif.rope import frequencies, rope_settings

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "vocab_size": 40,
    "draft_vocab_size": 20,
    "max_position_embeddings": 64,
    "rope_theta": 100.0,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_hidden_layers": 2},
    "norm per state": {"fc_norm": True},
    "norm before fc": {"norm_before_fc": True},
    "normed output": {"norm_output": True},
    "interleaved rope of a part": {"rope_is_neox_style": False, "partial_rotary_factor": 0.67},
    "biases": {"bias": True},
    "wider target": {"target_hidden_size": 20},
    "two states": {"num_aux_hidden_states": 2},
    "rope parameters": {"rope_parameters": {"rope_theta": 50.0, "rope_type": "linear", "factor": 4.0}},
    "fused names": {},
}
LATENT: dict[str, Any] = {
    **PLAIN,
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "q_lora_rank": 8,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
LATENT_VARIANTS: dict[str, dict[str, Any]] = {
    "latent": {},
    "latent, yarn": {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    "latent, yarn without mscale": {"rope_scaling": YARN, "rope_interleave": False},
    "latent, EAGLE-3.1": {"fc_norm": True, "norm_output": True},
}
ROPES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "attn_factor": 1.2,
    },
}
TOKENS, PROMPT, STEPS = 24, 6, 4


def weights(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random weights in the published names."""

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    hidden, wide = config["hidden_size"], config.get("target_hidden_size", config["hidden_size"])
    count = config.get("num_aux_hidden_states", 3)
    found = {
        "fc.weight": made(hidden, count * wide),
        "lm_head.weight": made(20, hidden),
        "norm.weight": made(hidden) + 1,
    }
    found["d2t"] = torch.randperm(40, generator=generator)[:20].sort().values - torch.arange(20)
    for layer in range(config["num_hidden_layers"]):
        start = f"layers.{layer}." if layer else "midlayer."
        width = hidden if layer else 2 * hidden
        attention = latent_attention if "kv_lora_rank" in config else plain_attention
        found |= {f"{start}self_attn.{part}.weight": made(*shape) for part, shape in attention(config, width).items()}
        if "kv_lora_rank" in config:
            found[f"{start}self_attn.q_a_layernorm.weight"] = made(config["q_lora_rank"]) + 1
            found[f"{start}self_attn.kv_a_layernorm.weight"] = made(config["kv_lora_rank"]) + 1
        found |= {f"{start}mlp.{part}_proj.weight": made(24, hidden) for part in ("gate", "up")}
        found[f"{start}mlp.down_proj.weight"] = made(hidden, 24)
        for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            found[f"{start}{norm}.weight"] = made(hidden) + 1
        if config.get("bias"):
            found[f"{start}self_attn.o_proj.bias"] = made(hidden)
    if config.get("bias"):
        found["fc.bias"] = made(hidden)
    if config.get("fc_norm"):
        low, high = ("fc_norm.0", "fc_norm.2") if "kv_lora_rank" in config else ("aux_norm_low", "aux_norm_high")
        found |= {f"{name}.weight": made(wide) + 1 for name in (low, "fc_norm.1", high)}
    if config.get("norm_before_fc"):
        found["input_norm.weight"] = made(count * wide) + 1
    if wide != hidden:
        found["embed_tokens.weight"] = made(40, hidden)
    return found


def plain_attention(config: dict[str, Any], width: int) -> dict[str, tuple[int, int]]:
    """Shapes of an ordinary attention's projections."""
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    hidden = config["hidden_size"]
    return {
        "q_proj": (queries, width),
        "k_proj": (keys, width),
        "v_proj": (keys, width),
        "o_proj": (hidden, queries),
    }


def latent_attention(config: dict[str, Any], width: int) -> dict[str, tuple[int, int]]:
    """Shapes of a latent attention's projections."""
    heads, query, latent = config["num_attention_heads"], config["q_lora_rank"], config["kv_lora_rank"]
    plain, turned, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    return {
        "q_a_proj": (query, width),
        "q_b_proj": (heads * (plain + turned), query),
        "kv_a_proj_with_mqa": (latent + turned, width),
        "kv_b_proj": (heads * (plain + value), latent),
        "o_proj": (config["hidden_size"], heads * value),
    }


class Naive:
    """The drafter once more: a row at a time, everything anew for every draft."""

    def __init__(self, config: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
        self.config, self.stored = config, stored

    def weight(self, name: str) -> torch.Tensor:
        for old in (name, name.replace("layers.0.", "midlayer.")):
            if old in self.stored:
                return self.stored[old]
        legacy = {"fc_norm.0.weight": "aux_norm_low.weight", "fc_norm.2.weight": "aux_norm_high.weight"}
        return self.stored[legacy[name]]

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean() + self.config["rms_norm_eps"]).sqrt() * self.weight(name)

    def fc(self, states: list[torch.Tensor]) -> torch.Tensor:
        joined = torch.cat(states)
        if self.config.get("norm_before_fc"):
            joined = self.norm("input_norm.weight", joined)
        if self.config.get("fc_norm"):
            joined = torch.cat([self.norm(f"fc_norm.{n}.weight", state) for n, state in enumerate(states)])
        return self.weight("fc.weight") @ joined + self.stored.get("fc.bias", torch.zeros(()))

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        size = int(self.config.get("partial_rotary_factor", 1.0) * self.config["head_dim"])
        scaling = self.config.get("rope_parameters") or {}
        theta = scaling.get("rope_theta", self.config["rope_theta"])
        place = position / scaling.get("factor", 1.0)
        out = x.clone()
        for pair in range(size // 2):
            angle = torch.tensor(place * theta ** (-2 * pair / size))
            neox = self.config.get("rope_is_neox_style", True)
            one, two = (pair, pair + size // 2) if neox else (2 * pair, 2 * pair + 1)
            out[..., one] = x[..., one] * angle.cos() - x[..., two] * angle.sin()
            out[..., two] = x[..., two] * angle.cos() + x[..., one] * angle.sin()
        return out

    def attended(self, start: str, x: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scaled queries [heads, size], keys and values [heads, …] of one row."""
        heads, groups, size = (
            self.config["num_attention_heads"],
            self.config["num_key_value_heads"],
            self.config["head_dim"],
        )
        q, k, v = (
            (self.weight(f"{start}{part}_proj.weight") @ x).view(n, size)
            for part, n in zip("qkv", (heads, groups, groups), strict=True)
        )
        shared = [head * groups // heads for head in range(heads)]
        return self.rotate(q, position) / size**0.5, self.rotate(k, position)[shared], v[shared]

    def run(self, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (embedding, hidden) at positions 0, 1, …; the last one's state for the head, and for the next step."""
        fed = [(hidden, None) for _, hidden in rows]
        for layer in range(self.config["num_hidden_layers"]):
            start, out, keys, values = f"layers.{layer}.", [], [], []
            for position, (hidden, before) in enumerate(fed):
                residual = hidden if before is None else hidden + before
                x = self.norm(f"{start}hidden_norm.weight", residual)
                if layer == 0:
                    x = torch.cat([self.norm(f"{start}input_layernorm.weight", rows[position][0]), x])
                q, k, v = self.attended(f"{start}self_attn.", x, position)
                keys.append(k)
                values.append(v)
                mixed = []
                for head, query in enumerate(q):
                    scores = torch.stack([query @ key[head] for key in keys]).softmax(0)
                    mixed.append(sum(share * value[head] for share, value in zip(scores, values, strict=True)))
                joined = self.weight(f"{start}self_attn.o_proj.weight") @ torch.cat(mixed)
                name = f"{start}self_attn.o_proj.bias".replace("layers.0.", "midlayer.")
                residual = residual + joined + self.stored.get(name, torch.zeros(()))
                x = self.norm(f"{start}post_attention_layernorm.weight", residual)
                gate, up = (self.weight(f"{start}mlp.{part}_proj.weight") @ x for part in ("gate", "up"))
                out.append((self.weight(f"{start}mlp.down_proj.weight") @ (gate * gate.sigmoid() * up), residual))
            fed = out
        total = fed[-1][0] + fed[-1][1]
        normed = self.norm("norm.weight", total)
        return normed, normed if self.config.get("norm_output") else total

    def ranks(self, tokens: list[int], states: dict[int, torch.Tensor], layers: list[int]) -> list[list[int]]:
        """As `draft` gives them, with topk 20."""
        table = self.stored.get("embed_tokens.weight")
        embed = [states[0][n] if table is None else table[token] for n, token in enumerate(tokens)]
        target = self.stored["d2t"] + torch.arange(20)
        base = [(embed[n + 1], self.fc([states[layer][n] for layer in layers])) for n in range(len(tokens) - 1)]
        found = []
        for row in range(PROMPT - 1, len(tokens) - 1):
            rows, ranks = base[: row + 1], []
            for step in range(STEPS):
                if row + step + 2 >= len(tokens):
                    ranks.append(-1)
                    continue
                normed, fed = self.run(rows)
                order = target[(self.weight("lm_head.weight") @ normed).argsort(descending=True)].tolist()
                wanted = tokens[row + step + 2]
                ranks.append(order.index(wanted) if wanted in order else 20)
                rows = [*rows, (embed[row + step + 2], fed)]
            found.append(ranks)
        return found


class NaiveLatent(Naive):
    """With latent attention; its rotary embedding is SGLang's own."""

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        from sglang.srt.layers.rotary_embedding.factory import get_rope  # noqa: PLC0415 - only here, and slow

        size, scaling = self.config["qk_rope_head_dim"], self.config.get("rope_scaling")
        scaling = {**scaling, "rope_type": "deepseek_yarn"} if scaling else None
        neox = not self.config.get("rope_interleave", True)
        longest, theta = self.config["max_position_embeddings"], self.config["rope_theta"]
        rope = get_rope(size, size, longest, theta, neox, scaling, torch.float32)
        cosine, sine = rope.cos_sin_cache[position].float().chunk(2)
        out = x.clone()
        for pair in range(size // 2):
            one, two = (pair, pair + size // 2) if neox else (2 * pair, 2 * pair + 1)
            out[..., one] = x[..., one] * cosine[pair] - x[..., two] * sine[pair]
            out[..., two] = x[..., two] * cosine[pair] + x[..., one] * sine[pair]
        return out

    def attended(self, start: str, x: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, plain, latent = (self.config[n] for n in ("num_attention_heads", "qk_nope_head_dim", "kv_lora_rank"))
        low = self.norm(f"{start}q_a_layernorm.weight", self.weight(f"{start}q_a_proj.weight") @ x)
        q = (self.weight(f"{start}q_b_proj.weight") @ low).view(heads, -1)
        both = self.weight(f"{start}kv_a_proj_with_mqa.weight") @ x
        spread = self.weight(f"{start}kv_b_proj.weight") @ self.norm(f"{start}kv_a_layernorm.weight", both[:latent])
        spread = spread.view(heads, -1)
        turned = self.rotate(both[latent:], position)
        q = torch.cat([q[:, :plain], self.rotate(q[:, plain:], position)], 1)
        k = torch.cat([spread[:, :plain], turned.expand(heads, -1)], 1)
        scaling = self.config.get("rope_scaling") or {}
        grown = 0.1 * scaling.get("mscale_all_dim", 0.0) * math.log(scaling.get("factor", 1.0)) + 1.0
        return q * (grown**2 / q.shape[1] ** 0.5), k, spread[:, plain:]


def fused(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with the projections that engines fuse in one tensor each."""
    left = dict(stored)
    q, k, v = (left.pop(f"midlayer.self_attn.{part}_proj.weight") for part in "qkv")
    gate, up = (left.pop(f"midlayer.mlp.{part}_proj.weight") for part in ("gate", "up"))
    both = {"midlayer.self_attn.qkv_proj.weight": torch.cat([q, k, v])}
    return {**left, **both, "midlayer.mlp.gate_up_proj.weight": torch.cat([gate, up])}


def check_drafter(name: str, config: dict[str, Any], place: Path) -> None:
    """The evaluator's drafts of one variant are the naive ones."""
    naive = NaiveLatent if "kv_lora_rank" in config else Naive
    generator = torch.Generator().manual_seed(len(name))
    stored = weights(config, generator)
    directory = place / name.replace(" ", "-")
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    published = fused(stored) if name == "fused names" else stored
    save_file({key: value.contiguous() for key, value in published.items()}, directory / "model.safetensors")
    drafter = open_drafter(directory, Target(None), "cpu")
    wide = config.get("target_hidden_size", config["hidden_size"])
    layers = [3, 1, 2][: drafter.count]
    tokens = torch.randint(0, 40, (TOKENS,), generator=generator)
    states = {layer: torch.randn(TOKENS, wide, generator=generator) for layer in range(4)}
    sequence = Replayed(tokens, states, PROMPT)
    found = draft(drafter, sequence, fed_states(sequence, layers, {}), STEPS, 20).tolist()
    assert found == naive(config, stored).ranks(tokens.tolist(), states, layers), name
    assert len({rank for row in found for rank in row}) > 5, f"{name}: the ranks tell nothing"


def check_ropes() -> list[str]:
    """Frequencies and factors are SGLang's own."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope  # noqa: PLC0415 - only here, and slow

    for name, scaling in ROPES.items():
        config = {"max_position_embeddings": 256, "rope_theta": 1e4, "rope_scaling": scaling}
        inverse, factor, stretch = frequencies(rope_settings(config), 16)
        angle = torch.outer(torch.arange(200).float() / stretch, inverse)
        mine = torch.cat([angle.cos(), angle.sin()], -1) * factor
        theirs = get_rope(16, 16, 256, 1e4, True, scaling, torch.float32).cos_sin_cache[:200]
        assert torch.allclose(mine, theirs.float(), atol=2e-5), name
    return list(ROPES)


def check_accept() -> None:
    """Verifications along hand-written ranks: accepted drafts, the end of the text, the length as SGLang counts it."""
    ranks = torch.tensor([[0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, -1], [0, -1, -1], [-1, -1, -1]])
    found = accept(ranks, 1)
    # row 0: two accepted → row 3: two accepted, then the text ends at 7 tokens: 1 + 3 + 3
    assert (found["tokens"], found["verifications"], found["histogram"]) == (7, 2, [0, 0, 2, 0])
    assert (found["reached"], found["passed"]) == ([2, 2, 1], [2, 2, 0])
    assert found["length"] == 3.5
    assert accept(ranks, 2)["histogram"] == [0, 1, 0, 1]  # with two guesses a step, row 0 accepts all three


def check_refusals(place: Path) -> None:
    """What cannot be computed is said."""
    cases = {
        "another class": ({"architectures": ["LlamaForCausalLM"]}, {}, "names the class LlamaForCausalLM"),
        "latent without queries": ({"architectures": LATENT["architectures"]}, {}, "no q_lora_rank"),
        "two latent layers": ({**LATENT, "num_hidden_layers": 2}, {}, "has 2 layers"),
        "a tied head": ({**LATENT, "tie_word_embeddings": True}, {}, "tied to its embedding"),
        "no fc": ({}, {"fc.weight": None}, "hold no fc.weight"),
        "short d2t": ({}, {"d2t": torch.zeros(3, dtype=torch.long)}, "d2t has 3 entries for a head of 20 rows"),
        "numbers": ({}, {"fc.weight": torch.zeros(16, 48, dtype=torch.int8)}, "only drafters in floats"),
        "another width": ({"num_aux_hidden_states": 2}, {}, "but 2 states of 16 are 32"),
        "no head": (
            {"draft_vocab_size": None},
            {"lm_head.weight": None, "d2t": None},
            "gives this drafter the target's lm_head",
        ),
        "rope": ({"rope_scaling": {"type": "longrope"}}, {}, "'longrope', which is not computed"),
    }
    for name, (change, other, words) in cases.items():
        directory = place / f"refused-{name}".replace(" ", "-")
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**PLAIN, **change}))
        stored = {**weights(PLAIN, torch.Generator().manual_seed(1)), **other}
        save_file({key: value for key, value in stored.items() if value is not None}, directory / "model.safetensors")
        try:
            open_drafter(directory, Target(None), "cpu").rotation(torch.arange(3))
        except Failed as error:
            assert words in str(error), f"{name}: {error}"
        else:
            raise AssertionError(name)


def main() -> None:
    """Everything; an AssertionError names what does not hold."""
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        place = Path(scratch)
        variants = {name: {**PLAIN, **change} for name, change in VARIANTS.items()}
        variants |= {name: {**LATENT, **change} for name, change in LATENT_VARIANTS.items()}
        for name, config in variants.items():
            check_drafter(name, config, place)
        check_accept()
        check_refusals(place)
        ropes = check_ropes()
    print(json.dumps({"drafters": list(variants), "ropes": ropes}))


main()

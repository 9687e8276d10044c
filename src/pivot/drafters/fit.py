"""Whether a drafter's files fit each other, and whether its attention fits the backend it would inherit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pivot.drafters.configs import Config, Findings
from pivot.findings import Severity

# attention backends for MLA alone, which a drafter with ordinary attention cannot use (sglang issue 23490)
ONLY_MLA: Final = frozenset({"trtllm_mla", "cutlass_mla", "flashmla", "cutedsl_mla", "tokenspeed_mla"})
BACKENDS: Final = ("attention-backend", "prefill-attention-backend", "decode-attention-backend")
DRAFT_BACKEND: Final = "speculative-draft-attention-backend"
LAYER: Final = r"(?:model\.)?(?:midlayer|layers\.0)\."
# tensor → what its rows and columns are, as words that `_sizes` knows; the layer's input is two states wide
SHAPES: Final = {
    r"(?:model\.)?norm\.weight": ("hidden",),
    LAYER + r"(?:hidden_norm|input_layernorm|post_attention_layernorm)\.weight": ("hidden",),
    LAYER + r"self_attn\.q_proj\.weight": ("queries", "twice"),
    LAYER + r"self_attn\.[kv]_proj\.weight": ("keys", "twice"),
    LAYER + r"self_attn\.o_proj\.weight": ("hidden", "queries"),
    LAYER + r"mlp\.(?:gate|up)_proj\.weight": ("inner", "hidden"),
    LAYER + r"mlp\.down_proj\.weight": ("hidden", "inner"),
}
KEYS: Final = {
    "hidden": "hidden_size",
    "twice": "twice hidden_size",
    "inner": "intermediate_size",
    "queries": "num_attention_heads x head_dim",
    "keys": "num_key_value_heads x head_dim",
}


def shapes(drafter: Config, tensors: Mapping[str, tuple[str, tuple[int, ...]]], found: Findings) -> None:
    """Tensors against the sizes of the config beside them; the first that differs, and how many more do.

    Quantised tensors have shapes of their own and are left alone, as are sizes that the config does not say.
    """
    if drafter.mapping("quantization_config"):
        return
    sizes = _sizes(drafter)
    wrong = [
        f"{name} is {list(shape)}, where {' and '.join(KEYS[word] for word in words)} make {[sizes[w] for w in words]}"
        for name, (_, shape) in sorted(tensors.items())
        for pattern, words in SHAPES.items()
        if re.fullmatch(pattern, name)
        and all(sizes[word] for word in words)
        and shape != tuple(sizes[word] for word in words)
    ]
    if wrong:
        message = f"weights and config are not of one drafter: {wrong[0]}"
        message += f", and {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
        fix = "fetch config.json and the weights of one revision, and write the manifest anew: pivot manifest"
        found.add("SHAPE", Severity.ERROR, message, fix)


def _sizes(drafter: Config) -> dict[str, int]:
    """Sizes by word, 0 where the config does not say."""
    hidden, heads = drafter.integer("hidden_size") or 0, drafter.integer("num_attention_heads") or 0
    keys = drafter.integer("num_key_value_heads") or heads
    size = drafter.integer("head_dim") or (hidden // heads if heads else 0)
    inner = drafter.integer("intermediate_size") or 0
    return {"hidden": hidden, "twice": 2 * hidden, "inner": inner, "queries": heads * size, "keys": keys * size}


def backend(drafter: Config, flags: Mapping[str, Any], found: Findings) -> None:
    """The attention backend that a drafter inherits without one of its own."""
    inherited = next((flags[name] for name in BACKENDS if isinstance(flags.get(name), str)), None)
    if inherited not in ONLY_MLA or flags.get(DRAFT_BACKEND) is not None or drafter.integer("kv_lora_rank"):
        return
    message = f"the drafter's attention is no MLA, but it would inherit {inherited}, which is for MLA alone: a failed"
    message += " start and garbage were reported (sglang issue 23490)"
    fix = f"write {DRAFT_BACKEND}: flashinfer (or triton) into sglang_server_launch"
    found.add("BACKEND", Severity.WARNING, message, fix)

"""Whether a drafter's weights and settings fit its target, its class and its engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pivot.drafters import fit, vocabulary
from pivot.drafters.configs import LARGEST, short
from pivot.drafters.pair import ERROR, WARNING, Look, quantisation

NORMS = ("fc_norm", "use_aux_norm", "norm_output", "norm_before_fc")


def _sizes(look: Look) -> None:
    """Hidden size and vocabulary against the target."""
    size, given = look.target.integer("hidden_size"), look.drafter.integer("target_hidden_size")
    own = look.drafter.integer("hidden_size")
    if size and look.hidden_in and look.hidden_in != size:
        key = "target_hidden_size" if given else "hidden_size"
        message = f"{key} of the drafter is {look.hidden_in}, but the target's hidden size is {size}"
        look.found.add("HIDDEN", ERROR, message, "pin the drafter of this target")
    elif size and own and own != size and look.tensors is not None and not _has(look, "embed_tokens.weight"):
        message = (
            f"hidden_size {own} is not the target's {size}, so its embedding cannot be used, and there is no own one"
        )
        look.found.add("HIDDEN", ERROR, message, "pin a drafter with embed_tokens.weight")
    words, drafted = look.target.integer("vocab_size"), look.drafter.integer("vocab_size")
    if words and drafted and words != drafted:
        message = f"vocab_size of the drafter is {drafted}, but the target's is {words}"
        look.found.add("VOCAB", ERROR, message, "pin the drafter of this target")
    small = look.drafter.integer("draft_vocab_size")
    if small and drafted and small > drafted:
        message = f"draft_vocab_size {small} is larger than vocab_size {drafted}"
        look.found.add("VOCAB", ERROR, message, "fetch the pinned revision again")
    tied = look.drafter.data.get("tie_word_embeddings") is True
    if look.kind.get("loader", "").startswith("llama") and "draft_vocab_size" not in look.drafter.data and not tied:
        message = (
            f"draft_vocab_size is missing, which {look.drafter.architecture} reads without asking: it would not start"
        )
        look.found.add("VOCAB", ERROR, message, "write it, or null when the target's head is used")


def _has(look: Look, name: str) -> bool:
    tensors = look.tensors or {}
    return name in tensors or f"model.{name}" in tensors


def _vocabulary(look: Look) -> None:
    """d2t, t2d and the head."""
    if look.tensors is not None:
        vocabulary.check(look.drafter, look.tensors, look.pair.tensors, look.found, look.notes)


def _fit(look: Look) -> None:
    """Weights against the config beside them, attention against the backend."""
    if look.tensors is not None:
        fit.shapes(look.drafter, look.tensors, look.found)
    fit.backend(look.drafter, look.pair.flags, look.found)


def _context(look: Look) -> None:
    """Tokens: the engine gives the drafter the target's context, and refuses one longer than its own."""
    asked, own = look.context(), look.drafter.integer("max_position_embeddings")
    if asked is None or own is None:
        return
    scaling = look.drafter.mapping("rope_scaling")
    factor = _positive(scaling.get("factor")) or 1.0
    if "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3":
        factor = 1.0
    reach = int(own * factor)
    if reach >= asked:
        return
    override = str(look.pair.environment.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "")).lower()
    forced = override in ("1", "true", "yes", "y")
    message = f"the drafter reaches {reach} tokens (max_position_embeddings {own}), but the context is {asked}"
    fix = f"write context-length: {reach}, or use a drafter trained for longer texts"
    look.found.add("CONTEXT", WARNING if forced else ERROR, message, fix)


def _positive(value: object) -> float:
    """A usable number, 0 for anything else."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LARGEST
    return float(value) if usable and isinstance(value, int | float) else 0.0


def _rope(look: Look) -> None:
    """Rotary embedding: the drafter's own may differ from the target's, so only the impossible is a finding."""
    theta, scaling = look.drafter.rope
    other, others = look.target.rope
    if theta is not None and _positive(theta) < 1000:
        message = f"rope_theta of the drafter is {short(theta)}; values from 10000 on are usual"
        look.found.add("ROPE", WARNING, message, "compare it with the one it was trained with")
    # llama3 stretches by frequency: how far is max_position_embeddings
    stretched = {} if scaling.get("rope_type", scaling.get("type")) == "llama3" else scaling
    reach = int(_positive(stretched.get("original_max_position_embeddings")) * _positive(stretched.get("factor")))
    asked = look.context()
    if reach and asked and reach < asked:
        message = f"the drafter's rope scaling reaches {reach} tokens, but the context is {asked}"
        look.found.add("ROPE", WARNING, message, "expect short accept lengths beyond it, or ask for less context")
    mine, its = (theta, scaling.get("factor")), (other, others.get("factor"))
    if mine != its:
        look.notes.append(
            f"rope: theta {short(theta)}, factor {short(mine[1])} here, {short(other)} and {short(its[1])} in the "
            "target; both can be right, it is a matter of the drafter's training"
        )


def _class(look: Look) -> None:
    """What the drafter's class refuses or does not read."""
    name, version = look.drafter.architecture, look.pair.version
    number = look.drafter.integer("num_hidden_layers")
    if look.kind.get("one_layer") and number and number != 1:
        message = f"num_hidden_layers is {number}, but {name} of SGLang {version} takes 1 only"
        look.found.add("NUM-LAYERS", ERROR, message, "pin a drafter with one layer")
    if look.kind.get("needs_q_lora") and look.drafter.integer("q_lora_rank") is None:
        look.found.add("Q-LORA", ERROR, f"q_lora_rank is missing, which {name} needs", "pin a drafter that has it")
    unread = [key for key in NORMS if look.drafter.data.get(key) and key not in look.kind.get("reads", [key])]
    if unread:
        message = f"{', '.join(unread)} of the drafter's config.json is not read by {name} of SGLang {version}"
        message += ": it would be served without them, with a low accept length"
        look.found.add("NORMS", ERROR, message, "pin an SGLang that reads them (EAGLE-3.1: sglang pull request 26506)")


def _quantised(look: Look) -> None:
    """Quantisation of the drafter itself, and what it would inherit."""
    own = look.drafter.mapping("quantization_config")
    dtypes = {dtype for name, (dtype, _) in (look.tensors or {}).items() if not vocabulary.is_map(name)}
    others = dtypes - vocabulary.FLOATS
    if own or (others and look.kind.get("float_only")):
        what = own.get("quant_method", own.get("quant_algo", "some method")) if own else ", ".join(sorted(others))
        message = f"the drafter's weights are quantised ({short(what)})"
        certain = bool(look.kind.get("float_only"))
        if certain:
            message += f", but {look.drafter.architecture} takes BF16, F16 and F32 only"
        look.found.add("QUANTISED", ERROR if certain else WARNING, message, "pin a drafter in bfloat16")
    if own or look.pair.flags.get("speculative-draft-model-quantization") is not None:
        return
    flag = look.pair.flags.get("quantization")
    method = str(flag or quantisation(look.pair.target))
    if not method or method == "unquant":
        return
    certain = flag is not None or any(word in method.lower() for word in ("fp4", "modelopt", "awq"))
    message = f"the drafter is not quantised, but would inherit {short(method)} of the target"
    fix = "write speculative-draft-model-quantization: unquant into sglang_server_launch"
    look.found.add("QUANT-INHERITED", ERROR if certain else WARNING, message, fix)


# names of tensors that a loader has a place for (engine_models.LOADERS), one pattern a loader; others are dropped
_MLP = r"mlp\.(gate|up|down)_proj\.\w+|(input_layernorm|hidden_norm|post_attention_layernorm)\.weight"
_MHA = rf"self_attn\.[qkvo]_proj\.\w+|{_MLP}"
_MLA = rf"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|q_a_layernorm|kv_a_layernorm)\.\w+|{_MLP}"
_OUTER = r"fc\.(weight|bias)|norm\.weight|embed_tokens\.weight"
LAYER_NAMES = {
    "llama-midlayer": re.compile(rf"(model\.)?midlayer\.({_MHA})"),
    "llama": re.compile(rf"(model\.)?(midlayer|layers\.\d+)\.({_MHA})"),
    "mla": re.compile(rf"(midlayer|layers\.0)\.({_MLA})"),
}
OUTER_NAMES = {
    "llama-midlayer": re.compile(rf"(model\.)?({_OUTER})|lm_head\.weight|.*(d2t|t2d).*"),
    "llama": re.compile(rf"(model\.)?({_OUTER})|lm_head\.weight|.*(d2t|t2d).*"),
    "mla": re.compile(rf"{_OUTER}|lm_head\.weight|(.*\.)?(d2t|t2d)"),
}
NORM_NAMES = re.compile(r"(model\.)?(fc_norm\.\d+|aux_norm_(low|mid|high)|input_norm)\.weight")


def _weights(look: Look) -> None:
    """Tensors that the loader has no place for and drops, and what it then lacks."""
    loader = look.kind.get("loader")
    if look.tensors is None or loader not in LAYER_NAMES or look.drafter.mapping("quantization_config"):
        return
    layer, outer = LAYER_NAMES[loader], OUTER_NAMES[loader]
    names = sorted(name for name in look.tensors if not name.endswith("rotary_emb.inv_freq"))
    norms = any(look.drafter.data.get(key) and key in look.kind.get("reads", []) for key in NORMS)
    dropped = [
        name
        for name in names
        if not layer.fullmatch(name) and not outer.fullmatch(name) and not (norms and NORM_NAMES.fullmatch(name))
    ]
    who = f"the loader of {look.drafter.architecture} in SGLang {look.pair.version}"
    lacking = [] if any(layer.fullmatch(name) for name in names) else ["weight of its layer"]
    lacking += [] if _taken(look, "fc.weight", outer) else ["fc.weight"]
    if lacking:
        message = f"{who} finds no {' and no '.join(lacking)} among the drafter's tensors"
        message += f"; it drops {_first(dropped)}" if dropped else ""
        look.found.add(
            "WEIGHTS", ERROR, message, "pin a revision in the layout that this engine loads, or another engine"
        )
    elif dropped:
        message = f"{who} has no place for {_first(dropped)} and drops {'it' if len(dropped) == 1 else 'them'}"
        look.found.add("WEIGHTS", WARNING, message, "pin a revision in the layout that this engine loads")


def _taken(look: Look, name: str, pattern: re.Pattern[str]) -> bool:
    return any(pattern.fullmatch(option) for option in (name, f"model.{name}") if option in (look.tensors or {}))


def _first(names: Sequence[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


PARTS: tuple[Callable[[Look], None], ...] = (_sizes, _vocabulary, _fit, _context, _rope, _class, _quantised, _weights)

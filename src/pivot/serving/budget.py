"""The memory of one card: what weights take, what is left for the KV cache, and how many tokens that is.

Arithmetic, not a measurement: weights are taken to be spread evenly over the cards, and what CUDA graphs, NCCL and
activations need is not known here, so the rule for them is an inference and says so. Sizes are in bytes unless a name
says GiB (2**30).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from pivot.drafters.pair import quantisation, release
from pivot.findings import Finding, Severity

ERROR, WARNING = Severity.ERROR, Severity.WARNING
GIB = 1 << 30
# GiB of a card for graphs, NCCL and activations, inferred: 0.94 of 95.6 GiB served without a drafter (5.7 left), 0.95
# did not with a graph file of NCCL (4.8); a drafter brings graphs of its own, and 0.85 served with one (rtx6kpro).
# Of a smaller card a tenth at most
ROOM, ROOM_WITH_DRAFTER = 5.0, 8.0
# tokens that a running request should have room for, inferred: a prompt and an answer of a page each
SHARE = 1024
# larger than any card: somebody wrote MiB
LARGEST_CARD = 2048
BYTES = {"bf16": 2, "bfloat16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1, "float16": 2, "float32": 4}
TP = ("tp-size", "tensor-parallel-size", "tp")
# what keeps weights in the machine's memory, on from 1 on
OFFLOADED = ("cpu-offload-gb", "offload-group-size")
# what spreads weights or cache, or makes weights smaller, in ways that this arithmetic does not follow
SPREAD = (
    *OFFLOADED,
    *("pp-size", "pipeline-parallel-size", "pp", "dp-size", "data-parallel-size", "dcp-size"),
    *("decode-context-parallel-size", "attn-cp-size", "enable-dp-attention"),
    *("kt-weight-path", "ple-offload-embedding", "torchao-config", "modelopt-quant"),
)
UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
Wrong = tuple[str, Severity, str, str]
"""A finding's code, severity, message and fix."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one card has to hold.

    card_gib: its memory; cards: over how many the weights are spread; fraction: mem-fraction-static; weights, drafter:
    of the whole checkpoints, drafter 0 without one; token: bytes of KV cache a token needs on each card; context:
    tokens of the longest request; requests: max-running-requests; limit: max-total-tokens. None: not set.
    """

    subject: str
    card_gib: float
    cards: int
    fraction: float
    weights: float
    drafter: float
    token: int
    context: int | None = None
    requests: int | None = None
    limit: int | None = None

    @property
    def static(self) -> float:
        """GiB of a card for weights and KV cache together."""
        return self.fraction * self.card_gib

    @property
    def shares(self) -> tuple[float, float]:
        """GiB of a card that the target's and the drafter's weights take."""
        return self.weights / self.cards / GIB, self.drafter / self.cards / GIB

    @property
    def pool(self) -> float:
        """GiB of a card that are left for the KV cache; negative when the weights do not fit."""
        return self.static - sum(self.shares)

    @property
    def room(self) -> float:
        """GiB of a card outside of the static part."""
        return self.card_gib - self.static

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds."""
        fit = max(0, math.floor(self.pool * GIB / self.token))
        return fit if self.limit is None else min(fit, self.limit)


def check(plan: Plan) -> list[Finding]:
    """What does not fit, with the numbers."""
    return [Finding(code, severity, plan.subject, text, fix) for code, severity, text, fix in _wrong(plan)]


def line(plan: Plan) -> str:
    """The budget in one line, for people."""
    weights, drafter = plan.shares
    parts = [f"weights {weights:.1f}"] + ([f"drafter {drafter:.1f}"] if plan.drafter else [])
    begin = f"{plan.static:.1f} of {plan.card_gib:g} GiB a card are static: {', '.join(parts)}"
    if plan.pool <= 0:
        return f"{begin}, nothing left for the KV cache"
    parts = [f"{begin}, KV cache {plan.pool:.1f} = {plan.tokens:,} tokens of {plan.token:,} B"]
    if plan.context:
        whole = plan.tokens // plan.context
        parts.append(f"{whole} request{'' if whole == 1 else 's'} of {plan.context:,} tokens fit{'s' * (whole == 1)}")
    if plan.requests:
        parts.append(f"or {plan.requests} of {plan.tokens // plan.requests:,}")
    return f"{'; '.join(parts)}; {plan.room:.1f} GiB for graphs, NCCL and activations"


def _wrong(plan: Plan) -> Iterator[Wrong]:
    weights, drafter = plan.shares
    both = f"weights of {weights:.1f} GiB" + (f" and a drafter of {drafter:.1f} GiB" if plan.drafter else "")
    static = f"{plan.fraction:g} x {plan.card_gib:g} = {plan.static:.1f} GiB"
    if plan.pool <= 0:
        message = f"{both} a card (tp-size {plan.cards}) do not fit into the static part, {static}"
        need = math.ceil((plan.weights + plan.drafter) / (plan.static * GIB))
        fix = f"raise tp-size (they alone need {max(need, plan.cards + 1)} cards) or mem-fraction-static"
        yield "BUDGET-WEIGHTS", ERROR, message, fix
    elif plan.context and plan.context > plan.tokens:
        if plan.limit == plan.tokens:
            message = f"one request of {plan.context:,} tokens does not fit: max-total-tokens is {plan.limit:,}"
        else:
            message = (
                f"one request of {plan.context:,} tokens does not fit: {static} static less {both} leave "
                f"{plan.pool:.1f} GiB of KV cache, {plan.tokens:,} tokens of {plan.token:,} B, before overheads"
            )
        fix = f"write context-length: {plan.tokens} or less, or make the cache larger"
        yield "BUDGET-CONTEXT", WARNING, message, fix
    elif plan.requests and plan.tokens // plan.requests < SHARE:
        message = (
            f"max-running-requests is {plan.requests}, and the KV cache of {plan.tokens:,} tokens has "
            f"{plan.tokens // plan.requests} for each: requests would be taken back and computed again"
        )
        fix = f"write max-running-requests: {max(1, plan.tokens // SHARE)} or less ({SHARE} tokens for each; inferred)"
        yield "BUDGET-REQUESTS", WARNING, message, fix
    usual, why = (ROOM_WITH_DRAFTER, "with a drafter") if plan.drafter else (ROOM, "without a drafter")
    least = min(usual, plan.card_gib / 10)
    if plan.room < least:
        message = (
            f"mem-fraction-static {plan.fraction:g} leaves {plan.room:.1f} of {plan.card_gib:g} GiB for graphs, NCCL "
            f"and activations, less than {least:g} GiB, which are inferred to be needed {why}"
        )
        fix = f"write mem-fraction-static: {math.floor((1 - least / plan.card_gib) * 100) / 100:g} or less"
        yield "BUDGET-ROOM", WARNING, message, fix


# --- from configs and variables


def kv_bytes(config: object, cards: int, width: int) -> int | None:
    """Bytes of KV cache that one token of a model needs on each card, None when its config does not say.

    cards: of tensor parallelism; width: bytes of a number. MLA keeps one compressed vector, whole on every card;
    otherwise keys and values of the heads, at least one head a card.
    """
    outer = config if isinstance(config, Mapping) else {}
    text = outer.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, Mapping) else outer
    layers = _whole(inner.get("num_hidden_layers"))
    if layers is None:
        return None
    rank = _whole(inner.get("kv_lora_rank"))
    if rank is not None:
        rope = _whole(inner.get("qk_rope_head_dim"))
        return None if rope is None else (rank + rope) * width * layers
    heads = _whole(inner.get("num_attention_heads"))
    kept = _whole(inner.get("num_key_value_heads")) or heads
    hidden, size = _whole(inner.get("hidden_size")), _whole(inner.get("head_dim"))
    if size is None and hidden and heads:
        size = hidden // heads
    if kept is None or not size:
        return None
    return 2 * max(1, kept // cards) * size * width * layers


def weight_bytes(manifest: Mapping[str, Any]) -> int | None:
    """Size of a model's safetensors files together, None when the manifest does not say."""
    files = manifest.get("files")
    sizes = [
        _whole(entry.get("size"))
        for name, entry in (files.items() if isinstance(files, Mapping) else ())
        if isinstance(entry, Mapping) and str(name).endswith(".safetensors")
    ]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def deployed(
    subject: str, values: Mapping[str, Any], read: Callable[[str], object]
) -> tuple[Plan | None, list[Finding]]:
    """The plan that a host's variables describe, None when they say too little; and what is wrong with its numbers.

    values: the host's variables, worked out; read: a manifest by its path, as JSON, None when it cannot be read.
    """
    card = _real(values.get("gpu_runtime_memory_gib"))
    flags = values.get("sglang_server_launch")
    if card is None or card <= 0 or values.get("gpu_runtime_accelerator") != "cuda" or not isinstance(flags, Mapping):
        return None, []
    fraction = _real(flags.get("mem-fraction-static"))
    wrong = [*_implausible(card, fraction)]
    if wrong:
        return None, [Finding(code, severity, subject, text, fix) for code, severity, text, fix in wrong]
    target = release(values, values.get("sglang_server_model_path"), read)
    drafter = release(values, values.get("sglang_server_drafter_path"), read)
    if target is None or (values.get("sglang_server_drafter_path") and drafter is None):
        return None, []
    if drafter is None:
        return of(subject, flags, card, target.get("config"), weight_bytes(target)), []
    own = drafter.get("config") or {}
    plan = of(subject, flags, card, target.get("config"), weight_bytes(target), own, weight_bytes(drafter))
    return plan, []


def of(
    subject: str,
    flags: Mapping[str, Any],
    card: float | None,
    target: object,
    weights: int | None,
    drafter: object = None,
    own: int | None = 0,
) -> Plan | None:
    """The plan of a launch, None when too little is known.

    card: GiB of one; target, drafter: their config.json, the drafter's None without one; weights, own: bytes of their
    safetensors files.
    """
    fraction = _real(flags.get("mem-fraction-static"))
    cards = _whole(next((flags[name] for name in TP if name in flags), 1))
    kind = flags.get("kv-cache-dtype", "auto")
    # without a word of the launch the cache is of the model's type, bf16 with all models that are served here
    width = BYTES.get("bf16" if kind == "auto" else kind) if isinstance(kind, str) else None
    spread = any(_spreads(name, flags[name]) for name in SPREAD if name in flags)
    # weights that are made smaller while they are loaded
    spread = spread or bool(flags.get("quantization") and not quantisation(target))
    if fraction is None or not 0 < fraction < 1 or cards is None or width is None or spread or card is None:
        return None
    token = kv_bytes(target, cards, width)
    draft = 0 if drafter is None else kv_bytes(drafter, cards, width)
    if not weights or own is None or token is None or draft is None:
        return None
    return Plan(
        subject=subject,
        card_gib=card,
        cards=cards,
        fraction=fraction,
        weights=weights,
        drafter=own,
        token=token + draft,
        context=_tokens(flags.get("context-length")),
        requests=_whole(flags.get("max-running-requests")),
        limit=_tokens(flags.get("max-total-tokens")),
    )


def _implausible(card: float, fraction: float | None) -> Iterator[Wrong]:
    if card > LARGEST_CARD:
        message = f"gpu_runtime_memory_gib is {card:g}, more than any card has"
        yield "BUDGET-CARD", ERROR, message, f"it is in GiB: write {card / 1024:.1f} if these are MiB"
    if fraction is not None and not 0 < fraction < 1:
        message = f"mem-fraction-static is {fraction:g}, not a part of the card's memory"
        yield "BUDGET-FRACTION", ERROR, message, "write a number between 0 and 1, for example 0.85"


def _spreads(name: str, value: object) -> bool:
    """Whether a flag is more than off; what cannot be read is taken as on."""
    if value in (None, False, 0, "0", "") and value is not True:
        return False
    if name in OFFLOADED:
        number = _real(value)
        return number is None or number >= 1
    return _whole(value) != 1


def _whole(value: object) -> int | None:
    """A positive whole number, also as a text; None when it is none."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"0*[1-9][0-9]{0,15}", value) else None
    return value if 0 < value < 1 << 60 else None


def _real(value: object) -> float | None:
    """A finite number, also as a text; None when it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and not re.fullmatch(r"[+-]?[0-9]{1,15}(\.[0-9]{1,15})?", value):
        return None
    if isinstance(value, int) and abs(value) > 1 << 60:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _tokens(value: object) -> int | None:
    """A number of tokens as SGLang reads it: 131072, 128k or 25.6k (thousands), 128Ki."""
    form = r"([0-9]{1,9})(Ki|Mi|Gi|Ti)|([0-9]{1,9}(?:\.[0-9]{1,9})?)(k|M|G|T)"
    match = re.fullmatch(form, value) if isinstance(value, str) else None
    if match is None:
        return _whole(value)
    return _whole(int(Decimal(match[1] or match[3]) * UNITS[match[2] or match[4]]))

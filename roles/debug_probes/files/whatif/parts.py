"""What a drafter's parts tell without any state."""

from __future__ import annotations

from typing import Optional

import torch

from whatif.drafter import Drafter
from whatif.drafting import Replayed
from whatif.files import Json
from whatif.repairs import from_t2d, nearest_rows

SAMPLED = 256  # rows of the head that are compared with the target's


def parts(drafter: Drafter, vocabulary: Optional[int]) -> Json:
    """Quantities of the drafter's parts that need no state."""
    weights = drafter.weights
    norms = {name: weights[name] for name in weights if name.endswith("norm.weight") or "norm." in name}
    return {
        "fc": {"blocks": [round(float(block.norm()), 6) for block in drafter.blocks()]},
        "head": _about_head(drafter),
        "d2t": _about_d2t(drafter, vocabulary),
        "norms": {
            name: {"mean": float(x.mean()), "least": float(x.min()), "most": float(x.max())}
            for name, x in sorted(norms.items())
        },
        "zero": sorted(name for name, x in weights.items() if not bool(x.any())),
        "not_finite": sorted(name for name, x in weights.items() if not bool(x.isfinite().all())),
        "rope": drafter.rotation_settings,
        "target_rope": drafter.rope_of(drafter.target.config) if drafter.target.config else None,
        "from_target": drafter.from_target,
        "unused": drafter.unused,
        "count": drafter.count,
    }


def _about_head(drafter: Drafter) -> Json:
    """The head's rows, and how far they point where the target's rows of the same tokens point."""
    head = drafter.weights["lm_head.weight"]
    answer: Json = {"own": drafter.own_head, "rows": len(head), "row_norm": float(head.norm(dim=-1).mean())}
    other = drafter.target.head() if drafter.own_head else None
    if other is None or other.shape[-1] != head.shape[-1]:
        return {**answer, "cosine": None, "nearest_is_own": None}
    rows = torch.linspace(0, len(head) - 1, min(SAMPLED, len(head))).long()
    tokens = drafter.tokens[rows]
    inside = (tokens >= 0) & (tokens < len(other))
    there = other[tokens.clamp(0, len(other) - 1)].to(drafter.device, torch.float32)
    cosine = torch.nn.functional.cosine_similarity(head[rows.to(head.device)], there, dim=-1).cpu()
    nearest = nearest_rows(drafter, rows)
    best = torch.nn.functional.cosine_similarity(
        head[rows.to(head.device)], other[nearest].to(drafter.device, torch.float32), dim=-1
    )
    return {
        **answer,
        "cosine": round(float(cosine.masked_fill(~inside, 0.0).mean()), 4),
        "best_cosine": round(float(best.mean()), 4),
        "nearest_is_own": round(float((nearest == tokens).float().mean()), 4),
    }


def _about_d2t(drafter: Drafter, vocabulary: Optional[int]) -> Json:
    """Whether d2t is there, sane as differences, and in line with t2d. vocabulary: the target's, where known."""
    d2t, t2d = drafter.d2t, drafter.t2d
    size = vocabulary or (len(t2d) if t2d is not None else None)
    answer: Json = {"present": d2t is not None, "vocabulary": size, "rows": drafter.head_rows, "t2d": t2d is not None}
    marked = None if t2d is None or int(t2d.sum()) != drafter.head_rows else from_t2d(drafter)
    answer["agrees_with_t2d"] = None if marked is None else bool((drafter.tokens == marked).all())
    if d2t is None:
        return answer
    tokens = drafter.tokens
    answer["zero"] = not bool(d2t.any())
    answer["different_tokens"] = len(tokens.unique())
    answer["outside"] = int(((tokens < 0) | (tokens >= size)).sum()) if size else None
    answer["ascending_as_absolute"] = bool((d2t[1:] > d2t[:-1]).all())
    return answer


def about_embedding(drafter: Drafter, sequence: Replayed) -> Json:
    """Whether the drafter's own embedding, where it has one, is the target's: relative distance on the tokens seen."""
    answer: Json = {"own": drafter.own_embedding, "used": not drafter.shares_embedding, "distance": None}
    if drafter.own_embedding:
        own = drafter.weights["embed_tokens.weight"][sequence.tokens.to(drafter.device)].cpu()
        seen = sequence.states[0]
        if own.shape == seen.shape:
            answer["distance"] = round(float((own - seen).norm() / seen.norm()), 6)
    return answer

"""What may be changed in one part of a drafter."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import torch

from whatif.drafter import CHUNK, Drafter
from whatif.files import Failed, Json

MOST_PRODUCTS = 2e13  # multiplications: some tens of seconds on a server's CPU
FEEDS = ("shift", "shuffle", "skip_fc")  # changes to what the drafter is fed


def _fc_scale(drafter: Drafter, factors: List[float]) -> None:
    if len(factors) != drafter.count:
        raise Failed(f"fc has {drafter.count} blocks, and {len(factors)} factors are given")
    drafter.scales = list(factors)


def _d2t(drafter: Drafter, source: str) -> None:
    if source == "none":
        drafter.tokens = drafter.token_map(None)
    elif source == "absolute" and drafter.d2t is not None:
        drafter.tokens = drafter.d2t
    elif source == "t2d" and drafter.t2d is not None:
        drafter.tokens = from_t2d(drafter)
    elif source == "head":
        drafter.tokens = nearest_rows(drafter)
    else:
        raise Failed(f"d2t cannot be taken from {source!r}: the drafter's files do not hold it")


def from_t2d(drafter: Drafter) -> torch.Tensor:
    """The tokens that t2d marks, ascending: what d2t should lead to."""
    assert drafter.t2d is not None  # noqa: S101 - the callers look
    marked = drafter.t2d.nonzero().flatten()
    if len(marked) != drafter.head_rows:
        raise Failed(f"t2d marks {len(marked)} tokens for a head of {drafter.head_rows} rows")
    return marked


def _head(drafter: Drafter, source: str) -> None:
    head = drafter.target.head()
    if source != "target" or head is None:
        raise Failed("the target's head is not there to be put in the drafter's place")
    inside = drafter.tokens.clamp(0, len(head) - 1)
    drafter.weights["lm_head.weight"] = head[inside].to(drafter.device, torch.float32)


def _rope(drafter: Drafter, change: Any) -> None:
    if change == "target":
        drafter.turn_as({**drafter.target.config, "partial_rotary_factor": 1.0})
    elif change == "other style":
        drafter.rotation_settings = {**drafter.rotation_settings, "neox": not drafter.rotation_settings["neox"]}
    else:
        drafter.rotation_settings = {**drafter.rotation_settings, **change}


def _ones(drafter: Drafter, names: List[str]) -> None:
    for name in names:
        drafter.weights[name] = torch.ones_like(drafter.weights[name])


def _off(drafter: Drafter, parts: List[str]) -> None:
    drafter.off = tuple(parts)


def _norm_output(drafter: Drafter, value: bool) -> None:
    drafter.norm_output = value


REPAIRS: Dict[str, Callable[[Drafter, Any], None]] = {
    "fc_scale": _fc_scale,
    "d2t": _d2t,
    "head": _head,
    "rope": _rope,
    "ones": _ones,
    "off": _off,
    "norm_output": _norm_output,
}


def repaired(drafter: Drafter, repair: Json) -> Drafter:
    """The same drafter with parts changed; what concerns the states it is fed is not looked at here."""
    changed = drafter.changed()
    for name, value in repair.items():
        if name in REPAIRS:
            REPAIRS[name](changed, value)
        elif name not in FEEDS:
            raise Failed(f"no repair is called {name!r}; there are {', '.join([*REPAIRS, *FEEDS])}")
    return changed


def nearest_rows(drafter: Drafter, rows: Optional[torch.Tensor] = None) -> torch.Tensor:
    """For rows of the drafter's head (all when None), the row of the target's head that points the same way."""
    head = drafter.target.head()
    if head is None:
        raise Failed("the target's head is not there to be compared with the drafter's")
    own = drafter.weights["lm_head.weight"]
    own = own if rows is None else own[rows.to(own.device)]
    if own.numel() * len(head) > MOST_PRODUCTS:
        raise Failed("comparing every row of the drafter's head with every row of the target's takes too long here")
    unit = torch.nn.functional.normalize(head.to(drafter.device, torch.float32), dim=-1)
    return torch.cat([(part @ unit.T).argmax(-1).cpu() for part in own.split(CHUNK)])

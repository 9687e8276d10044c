"""Rotary embeddings as SGLang computes them."""

from __future__ import annotations

import math
from typing import Tuple

import torch

from whatif.files import Failed, Json

Rotation = Tuple[torch.Tensor, torch.Tensor]


def rotate(x: torch.Tensor, rotation: Rotation, neox: bool) -> torch.Tensor:
    """Rotary embedding of [heads, n, size]; columns past the rotary width stay as they are."""
    cosine, sine = rotation
    width = 2 * cosine.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if neox:
        first, second = turned.chunk(2, -1)
        done = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
        done = torch.stack([first * cosine - second * sine, second * cosine + first * sine], -1).flatten(-2)
    return torch.cat([done, rest], -1)


def rope_settings(config: Json, *, latent: bool = False) -> Json:
    """Theta, scaling and style, from whichever of the two spellings of a config is used.

    latent: as the classes of multi-head latent attention read them, which take every scaling for DeepSeek's YaRN.
    """
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    named = scaling.get("rope_type") or scaling.get("type")
    found = {
        "theta": float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "longest": int(config.get("max_position_embeddings", 8192)),
    }
    if latent:
        yarn = bool(scaling) and named != "default"
        return {
            **found,
            "kind": "deepseek_yarn" if yarn else "default",
            "scaling": {"mscale": 1.0, "mscale_all_dim": 0.0, **scaling} if yarn else {},
            "neox": not config.get("rope_interleave", True),
            "share": 1.0,
        }
    original = config.get("original_max_position_embeddings")
    return {
        **found,
        "kind": "default" if named in (None, "mrope") else named,
        "scaling": {**scaling, **({"original_max_position_embeddings": original} if original else {})},
        "neox": bool(config.get("rope_is_neox_style", True)),
        "share": float(config.get("partial_rotary_factor") or 1.0),
    }


def frequencies(settings: Json, size: int) -> Tuple[torch.Tensor, float, float]:
    """Inverse frequencies [rotary / 2], what cosines and sines are multiplied with, what positions are divided by."""
    rotary = int(settings["share"] * size)
    theta, scaling, kind = settings["theta"], settings["scaling"], settings["kind"]
    factor = float(scaling.get("factor") or 1.0)
    exponent = torch.arange(0, rotary, 2).float() / rotary
    plain = 1.0 / theta**exponent
    original = float(scaling.get("original_max_position_embeddings") or settings["longest"])
    if kind == "default":
        return plain, 1.0, 1.0
    if kind == "linear":
        return plain, 1.0, factor
    if kind == "dynamic" and "alpha" not in scaling:
        grown = theta * (factor * factor - (factor - 1)) ** (rotary / (rotary - 2))
        return 1.0 / grown**exponent, 1.0, 1.0
    if kind == "llama3":
        low, high = float(scaling.get("low_freq_factor", 1.0)), float(scaling.get("high_freq_factor", 4.0))
        waves = 2 * math.pi / plain
        blend = (original / waves - low) / (high - low) if low != high else torch.zeros_like(waves)
        mixed = (1 - blend) * plain / factor + blend * plain
        slow = torch.where(waves > original / low, plain / factor, mixed)
        return torch.where(waves < original / high, plain, slow), 1.0, 1.0
    if kind in ("yarn", "deepseek_yarn"):
        return _yarn(plain, theta, rotary, original, scaling)
    raise Failed(f"the drafter's rope is of the type {kind!r}, which is not computed here")


def _yarn(
    plain: torch.Tensor, theta: float, rotary: int, original: float, scaling: Json
) -> Tuple[torch.Tensor, float, float]:
    """YaRN as the engine computes it."""
    factor = float(scaling.get("factor") or 1.0)

    def edge(turns: float) -> float:
        return rotary * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = edge(float(scaling.get("beta_fast", 32))), edge(float(scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    ramp = ((torch.arange(rotary // 2).float() - low) / (high - low or 0.001)).clamp(0, 1)
    kept = (1 - ramp) * float(scaling.get("extrapolation_factor", 1))
    inverse = plain / factor * (1 - kept) + plain * kept

    both = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if None in both:
        scale = yarn_size(factor, 1.0)
    else:
        scale = yarn_size(factor, float(both[0] or 0)) / yarn_size(factor, float(both[1] or 0))
    return inverse, scale * float(scaling.get("attn_factor", 1)), 1.0


def yarn_size(factor: float, weight: float) -> float:
    """What YaRN multiplies with for a context that grows by a factor."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

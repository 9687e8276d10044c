"""Wrong drafters and wrong targets, made of the right ones when they are needed.

Runs with the engine's interpreter (torch, safetensors). Every mutation is one function over the named tensors; each is
seeded, so that a row of the table is the same model every time.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SEED = 5
Tensors = dict[str, torch.Tensor]


def _named(tensors: Mapping[str, torch.Tensor], end: str) -> str:
    """The one tensor whose name ends so; a ValueError when there is none or more than one."""
    names = [name for name in tensors if name == end or name.endswith("." + end)]
    if len(names) != 1:
        raise ValueError(f"{len(names)} tensors are called {end}; a mutation needs exactly one")
    return names[0]


def _noise(like: torch.Tensor, seed: int = SEED) -> torch.Tensor:
    """Standard normal numbers in float32, of the same shape."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def fc_order(tensors: Tensors, order: list[int]) -> None:
    """The blocks of fc's columns in another order, or other ones of them: block i of the result is block order[i]."""
    name = _named(tensors, "fc.weight")
    blocks = tensors[name].split(tensors[name].shape[0], dim=1)
    tensors[name] = torch.cat([blocks[index] for index in order], dim=1)


def fc_scale(tensors: Tensors, factors: list[float]) -> None:
    """Each block of fc's columns times a factor; 0 takes the layer away from the drafter."""
    name = _named(tensors, "fc.weight")
    blocks = tensors[name].chunk(len(factors), dim=1)
    tensors[name] = torch.cat([block * factor for block, factor in zip(blocks, factors, strict=True)], dim=1)


def d2t(tensors: Tensors, how: str) -> None:
    """The table of differences from draft to target tokens: ``zero``, ``absolute`` (target ids), ``shifted``."""
    name = _named(tensors, "d2t")
    table = tensors[name]
    if how == "zero":
        tensors[name] = torch.zeros_like(table)
    elif how == "absolute":
        tensors[name] = table + torch.arange(len(table), dtype=table.dtype)
    elif how == "shifted":
        tensors[name] = table.roll(1)
    else:
        raise ValueError(f"d2t: {how} is neither zero, absolute nor shifted")


def random(tensors: Tensors, end: str) -> None:
    """One tensor as if it had never been trained: normal numbers of the same spread."""
    name = _named(tensors, end)
    value = tensors[name]
    tensors[name] = (_noise(value) * value.float().std()).to(value.dtype)


def basis(tensors: Tensors, seed: int) -> None:
    """A drafter of another target: one whose hidden dimensions are the same ones in another order.

    Permutes what reads the target's states (each block of fc) and its embeddings (half of q, k and v).
    """
    fc = _named(tensors, "fc.weight")
    width = tensors[fc].shape[0]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    tensors[fc] = torch.cat([block[:, order] for block in tensors[fc].split(width, dim=1)], dim=1)
    for end in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
        name = _named(tensors, end)
        embeds, hidden = tensors[name].split(width, dim=1)
        tensors[name] = torch.cat([embeds[:, order], hidden], dim=1)
    norm = _named(tensors, "input_layernorm.weight")
    tensors[norm] = tensors[norm][order]


def noise(tensors: Tensors, share: float) -> None:
    """Another checkpoint of a target: noise of this share of each layer matrix's spread."""
    for number, name in enumerate(sorted(tensors)):
        value = tensors[name]
        if ".layers." in name and value.dim() == 2 and value.is_floating_point():
            tensors[name] = (value.float() + _noise(value, SEED + number) * value.float().std() * share).to(value.dtype)


MUTATIONS: dict[str, Callable[..., None]] = {
    function.__name__: function for function in (fc_order, fc_scale, d2t, random, basis, noise)
}


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with changes: mappings are merged, null takes a key away."""
    result = dict(copy.deepcopy(config))
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            result[key] = merged(result.get(key) or {}, value)
        else:
            result[key] = value
    return result


def view(model: Path, place: Path, config: Mapping[str, Any], mutations: Mapping[str, Any]) -> Path:
    """A model's directory with another config and mutated weights; what stays the same is linked.

    mutations: name in MUTATIONS → its argument. A ValueError names a mutation that is not known.
    """
    unknown = [name for name in mutations if name not in MUTATIONS]
    if unknown:
        raise ValueError(f"{unknown[0]} is no mutation; known are {', '.join(MUTATIONS)}")
    place.mkdir(parents=True)
    own = {"config.json", *([path.name for path in model.glob("*.safetensors")] if mutations else [])}
    for path in sorted(model.iterdir()):
        if path.name not in own:
            (place / path.name).symlink_to(path.resolve())
    changed = merged(json.loads((model / "config.json").read_text(encoding="utf-8")), config)
    (place / "config.json").write_text(json.dumps(changed, indent=1), encoding="utf-8")
    for path in sorted(model.glob("*.safetensors")) if mutations else ():
        tensors = load_file(path)
        for name, argument in mutations.items():
            MUTATIONS[name](tensors, argument)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, place / path.name)
    return place


if __name__ == "__main__":
    view(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]))

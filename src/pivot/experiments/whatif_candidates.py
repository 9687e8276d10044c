"""The wirings and repairs that a what-if evaluates: those that people get wrong, and single parts changed.

A layer is named by its input, and a wiring is the layer inputs in the order of `fc`'s slices.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pivot.drafters.layers import default_layers
from pivot.experiments.whatif_figures import Layers

# factors that one block of fc, or all of it, is tried with
FACTORS = (0.25, 0.5, 2.0, 4.0)
# thetas that drafters in the field were trained with
THETAS = (1e4, 5e4, 1e5, 5e5, 1e6)
NORMS = (
    "layers.0.input_layernorm.weight",
    "layers.0.hidden_norm.weight",
    "layers.0.post_attention_layernorm.weight",
    "norm.weight",
)


def wirings(
    depth: int,
    count: int,
    *,
    served: Sequence[int] | None = None,
    contract: Sequence[int] | None = None,
    others: Mapping[str, Sequence[int]] | None = None,
) -> dict[Layers, str]:
    """Layer choices to evaluate → what each is. depth: layers of the target; count: states that `fc` takes.

    others: further choices by name, such as what a training sample suggests. Choices that the target has no states
    for are left out; the output of the last layer (input `depth`) can be evaluated, though no engine captures it.
    """
    default = _default(depth, count)
    base = _base(depth, count, served, contract)
    named: list[tuple[str, Sequence[int]]] = [
        ("served", served or []),
        ("contract", contract or []),
        ("the engine's default", default),
        *(others or {}).items(),
        *_shifted("contract", contract or []),
        *_shifted("served", served or []),
        *([] if contract else _shifted("default", default)),
    ]
    for index, shift in itertools.product(range(len(base)), (-1, 1)):
        changed = [layer + shift if other == index else layer for other, layer in enumerate(base)]
        if len(set(changed)) == len(changed):
            named.append((f"slice {index} {shift:+d}", changed))
    if base and base[0] != 0:
        named += [("embedding first", [0, *base[:-1]]), ("embedding for the first", [0, *base[1:]])]
    named.append(("the last layers", list(range(depth - count, depth))))
    orders = list(itertools.permutations(range(len(base))))[1:] if len(base) <= 3 else []
    named += [(f"order {' '.join(map(str, order))}", [base[index] for index in order]) for order in orders]
    found: dict[Layers, list[str]] = {}
    for name, layers in named:
        if len(layers) == count and all(0 <= layer <= depth for layer in layers):
            found.setdefault(tuple(layers), []).append(name)
    return {layers: ", ".join(names) for layers, names in found.items()}


def _default(depth: int, count: int) -> list[int]:
    return sorted(default_layers(depth)) if count == 3 else []


def _base(depth: int, count: int, served: Sequence[int] | None, contract: Sequence[int] | None) -> list[int]:
    """The choice that counts as right: the first of contract, served and default that `fc` can take; else empty."""
    return next((list(one) for one in (contract, served, _default(depth, count)) if one and len(one) == count), [])


def _shifted(name: str, layers: Sequence[int]) -> list[tuple[str, list[int]]]:
    return [(f"{name} {shift:+d}", [layer + shift for layer in layers]) for shift in (-1, 1)] if layers else []


def repairs(count: int) -> dict[str, dict[str, Any]]:
    """Changes to a single part of the drafter, or to what it is fed, by name."""
    found: dict[str, dict[str, Any]] = {"states of other positions": {"shuffle": True}}
    for index in range(count):
        found[f"slice {index} from the position before"] = {"shift": [int(index == other) for other in range(count)]}
        for factor in FACTORS:
            scale = [factor if other == index else 1.0 for other in range(count)]
            found[f"fc block {index} x {factor:g}"] = {"fc_scale": scale}
    found["all slices from the position before"] = {"shift": [1] * count}
    found |= {f"fc x {factor:g}": {"fc_scale": [factor] * count} for factor in FACTORS}
    found |= {f"d2t from {source}": {"d2t": source} for source in ("t2d", "absolute", "head")}
    found["the target's head"] = {"head": "target"}
    found |= {f"rope theta {theta:g}": {"rope": {"theta": theta}} for theta in THETAS}
    found["the target's rope"] = {"rope": "target"}
    found["rope in the other style"] = {"rope": "other style"}
    found |= {f"{name} of ones": {"ones": [name]} for name in NORMS}
    found |= {f"next step fed {how}": {"norm_output": value} for how, value in (("normed", True), ("raw", False))}
    found |= {f"without {part}": {"off": [part]} for part in ("attention", "mlp")}
    return found


def candidates(
    depth: int,
    count: int,
    *,
    served: Sequence[int] | None = None,
    contract: Sequence[int] | None = None,
    others: Mapping[str, Sequence[int]] | None = None,
) -> list[dict[str, Any]]:
    """Everything to evaluate, as the evaluator takes it: wirings, then repairs at the wiring that counts as right."""
    chosen = wirings(depth, count, served=served, contract=contract, others=others)
    found: list[dict[str, Any]] = [{"name": name, "layers": list(layers)} for layers, name in chosen.items()]
    base = _base(depth, count, served, contract)
    if tuple(base) in chosen:
        found += [{"name": name, "layers": base, "repair": repair} for name, repair in repairs(count).items()]
    return found

"""Which layer ids become which layers of the target, and which ids to write for wanted layers.

A layer is named by its INPUT: the input of layer 3 is the output of layer 2, the input of layer 0 is the embedding.
The rules are those of `pivot.engines.engine_models.SETTERS`.
"""

from __future__ import annotations

from collections.abc import Sequence


def default_layers(layers: int) -> tuple[int, ...]:
    """The layer inputs an engine keeps when no ids reach it; they are never shifted."""
    return (2, layers // 2, layers - 3)


def kept_layers(ids: Sequence[int], rule: str) -> tuple[int, ...]:
    """The layer inputs that ids become, in the order of the ids. ValueError for a rule that is not known."""
    if rule == "always_plus_one" or (rule == "plus_one_if_first_is_1" and ids and ids[0] == 1):
        return tuple(value + 1 for value in ids)
    if rule == "plus_one_if_first_is_1":
        return tuple(ids)
    raise ValueError(f"the rule {rule!r} is not known")


def ids_for(layers: Sequence[int], rule: str) -> tuple[int, ...] | None:
    """The ids to write so that exactly these layer inputs are kept, None when the rule has no such ids.

    Where a first id of 1 would shift all of them, another one is put first: states are packed in layer order, so the
    order of the ids says nothing else.
    """
    wanted = sorted(layers)
    if rule == "always_plus_one":
        candidates = [[value - 1 for value in wanted]]
    else:
        candidates = [wanted, [*wanted[1:2], *wanted[:1], *wanted[2:]], [value - 1 for value in wanted]]
    for ids in candidates:
        if all(value >= 0 for value in ids) and sorted(kept_layers(ids, rule)) == wanted:
            return tuple(ids)
    return None


def numbers(values: Sequence[int]) -> str:
    """``2, 30, 58``."""
    return ", ".join(map(str, values))


def as_outputs(layers: Sequence[int]) -> str:
    """Layer inputs as the outputs they are, for people: ``1, 29, 57``."""
    return ", ".join("the embedding" if layer == 0 else str(layer - 1) for layer in layers)

"""The faults and the places in SGLang where they are put in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

MODELS = "sglang.srt.models"
SETTERS = (
    f"{MODELS}.deepseek_v2.DeepseekV2ForCausalLM.set_eagle3_layers_to_capture",
    f"{MODELS}.llama.LlamaForCausalLM.set_eagle3_layers_to_capture",
)
PACKING = "sglang.srt.layers.logits_processor.pack_aux_hidden_states"
FEEDING = f"{MODELS}.llama_eagle3.LlamaModel.forward"
KINDS = ("capture", "order", "scale", "duplicate", "zero", "round", "previous")
PLACES = ("pack", "feed")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    kind: ``capture`` (the layer inputs `layers` are kept, whatever the config says), ``order`` (the slices in the
    order `order`), ``scale`` (`slice` times `factor`), ``duplicate`` (`slice` is a copy of slice `source`), ``zero``,
    ``round`` (`slice` goes through `dtype` and back), ``previous`` (`slice` holds the state of the position before,
    zero at a request's first).
    place: ``pack`` is where the logits processor packs the states, ``feed`` is the drafter's door; ``previous``
    needs positions, which are known at the second only.
    """

    kind: str
    place: str = "feed"
    layers: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    slice: int = 0
    source: int = 0
    factor: float = 1.0
    dtype: str = "bfloat16"
    slices: int = 3

    @classmethod
    def from_json(cls, text: str) -> Fault:
        """The variable's text as a fault; a ValueError or TypeError says what is wrong with it."""
        fault = cls(
            **{key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(text).items()}
        )
        if fault.kind not in KINDS or fault.place not in PLACES:
            raise ValueError(f"kind is one of {KINDS} and place one of {PLACES}")
        if fault.kind == "previous" and fault.place != "feed":
            raise ValueError("previous needs the place feed")
        return fault


def install(fault: Fault) -> None:
    """Register the hooks of one fault."""
    if fault.kind == "capture":
        for setter in SETTERS:
            HookRegistry.register(setter, _capturing(fault.layers), HookType.AFTER)
    elif fault.place == "pack":
        HookRegistry.register(PACKING, _packing(fault), HookType.AFTER)
    else:
        HookRegistry.register(FEEDING, _feeding(fault), HookType.AROUND)


def _capturing(layers: tuple[int, ...]) -> Callable[..., None]:
    """After a target was told which layer inputs to keep: others."""

    def hook(_result: object, model: Any, *_args: Any, **_kwargs: Any) -> None:
        model.model.layers_to_capture = list(layers)

    return hook


def _packing(fault: Fault) -> Callable[..., torch.Tensor]:
    """After the states of a forward were packed: the fault in a copy of them."""

    def hook(packed: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return broken(packed, fault)

    return hook


def broken(packed: torch.Tensor, fault: Fault) -> torch.Tensor:
    """A copy of packed states [rows, slices * width] with a fault that needs no positions."""
    parts = list(packed.chunk(fault.slices, dim=-1))
    if fault.kind == "order":
        parts = [parts[index] for index in fault.order]
    elif fault.kind == "scale":
        parts[fault.slice] = parts[fault.slice] * fault.factor
    elif fault.kind == "duplicate":
        parts[fault.slice] = parts[fault.source]
    elif fault.kind == "zero":
        parts[fault.slice] = torch.zeros_like(parts[fault.slice])
    elif fault.kind == "round":
        part = parts[fault.slice]
        parts[fault.slice] = part.to(getattr(torch, fault.dtype)).to(part.dtype)
    return torch.cat(parts, dim=-1)


def _feeding(fault: Fault) -> Callable[..., Any]:
    """Around the drafter's forward: what the target handed over with the fault, what the drafter hands itself as is."""
    memory: dict[tuple[int, int], torch.Tensor] = {}

    def hook(
        forward: Callable[..., Any], model: Any, input_ids: Any, positions: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        spec = batch.spec_info
        given = spec.hidden_states
        if given is None or given.shape[-1] != model.fc.in_features:
            return forward(model, input_ids, positions, batch, *args, **kwargs)
        if fault.kind == "previous":
            spec.hidden_states = _delayed(given, positions, batch, fault, memory)
        else:
            spec.hidden_states = broken(given, fault)
        try:
            return forward(model, input_ids, positions, batch, *args, **kwargs)
        finally:
            spec.hidden_states = given

    return hook


def _delayed(
    given: torch.Tensor, positions: torch.Tensor, batch: Any, fault: Fault, memory: dict[tuple[int, int], torch.Tensor]
) -> torch.Tensor:
    """The states with one slice of the position before; `memory` holds that slice by request slot and position."""
    result = given.clone()
    parts, delayed = given.chunk(fault.slices, dim=-1), result.chunk(fault.slices, dim=-1)
    owners = _owners(batch, given.shape[0])
    for row, key in enumerate(zip(owners, positions.tolist(), strict=True)):
        memory[key] = parts[fault.slice][row].clone()
    for row, (owner, position) in enumerate(zip(owners, positions.tolist(), strict=True)):
        delayed[fault.slice][row] = memory.get((owner, position - 1), torch.zeros_like(delayed[fault.slice][row]))
    return result


def _owners(batch: Any, rows: int) -> list[int]:
    """The request slot of each row."""
    slots = batch.req_pool_indices.tolist()
    lengths = batch.extend_seq_lens.tolist() if batch.extend_seq_lens is not None else []
    if sum(lengths) != rows:
        lengths = [rows // len(slots)] * len(slots)
    return [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]

#!/usr/bin/env python3
"""Evaluates an EAGLE-3 drafter on recorded states of its target: what would be accepted with another wiring or part.

One file for the engine's interpreter: standard library, torch and safetensors, no SGLang. It reads the tensors files
of the debug probe and the drafter's directory and writes nothing. The drafter is computed as SGLang's
`LlamaForCausalLMEagle3` computes it; a sequence is drafted along the recorded greedy tokens with a chain of `steps`,
and acceptance is counted as SGLang counts it. A layer is named by its input: the input of layer 0 is the embedding.

Usage: whatif.py '{"tensors": [file or directory, ...], "drafter": directory, "target": directory or null,
    "steps": 3, "topk": 1, "sequences": [{"id": text, "rid": text, "prompt_tokens": number, "tokens": number}, ...],
    "candidates": [{"name": text, "layers": [number, ...], "repair": {...}}, ...], "device": "cpu", "threads": 0,
    "since": "2026-11-29T20:00:00Z"}'
With "do": "read sample" or "match sample" it compares a stored training sample with the recorded states instead:
    '{"do": ..., "sample": file, "target": directory, "tensors": [...], "count": 2, "longest": 256}'
It prints one JSON object; with a sentence under "failed" it exits with 3.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from safetensors import safe_open
from torch.nn.functional import silu

FORMAT = 1
FAILED = 3
SCHEMA = "2"  # of the probe's tensors files
CLASSES = ("LlamaForCausalLMEagle3",)
PATIENCE = 10.0  # seconds until a file of states that is being written is there
CHUNK = 256  # rows for which attention scores or logits exist at one time
MOST_PRODUCTS = 2e13  # multiplications: some tens of seconds on a server's CPU
SAMPLED = 256  # rows of the head that are compared with the target's
LEGACY = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

Json = Dict[str, Any]
Weights = Dict[str, torch.Tensor]
Rotation = Tuple[torch.Tensor, torch.Tensor]


class Failed(Exception):  # noqa: N818 - it is a sentence for a person, not a programming error
    """Something that a person has to know, in one sentence."""


# --- files


def read_config(directory: Path) -> Json:
    """A model's config.json."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise Failed(f"{directory}/config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise Failed(f"{directory}/config.json holds no JSON object")
    return config


def read_weights(directory: Path) -> Weights:
    """All tensors of a model's directory, as they are stored."""
    files = sorted(directory.glob("*.safetensors"))
    tensors: Weights = {}
    try:
        for path in files:
            with safe_open(path, "pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 - no mapping
        for path in [] if files else sorted(directory.glob("*.bin")):
            tensors.update(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # safetensors and pickle raise many kinds, all mean the same here
        raise Failed(f"{path} cannot be read: {error}") from error
    if not tensors:
        raise Failed(f"{directory} holds no weights (*.safetensors or *.bin)")
    return tensors


class Target:
    """The few tensors of the target that are asked for, read one by one; none where its directory is not given."""

    def __init__(self, directory: Optional[Path]) -> None:
        self.config: Json = {}
        self._files: Dict[str, Path] = {}
        if directory is None:
            return
        whole = read_config(directory)
        self.config = {**whole, **(whole.get("text_config") or {})}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as opened:
                self._files.update(dict.fromkeys(opened.keys(), path))

    def tensor(self, *endings: str) -> Optional[torch.Tensor]:
        """The first tensor whose name ends so, None when there is none or it is quantised."""
        for ending in endings:
            for name, path in sorted(self._files.items()):
                if name == ending or name.endswith("." + ending):
                    with safe_open(path, "pt") as opened:
                        found: torch.Tensor = opened.get_tensor(name)
                    return found if found.is_floating_point() else None
        return None

    def head(self) -> Optional[torch.Tensor]:
        """The head over the whole vocabulary."""
        tied = ["embed_tokens.weight"] if self.config.get("tie_word_embeddings") else []
        return self.tensor("lm_head.weight", *tied)


class States:
    """The probe's tensors files: where the rows of every replayed request lie. Only what is asked for is read."""

    def __init__(self, paths: Sequence[str], since: str = "", wanted: Sequence[str] = ()) -> None:
        """since: recordings of earlier starts are left out; wanted: requests whose files may be on their way yet."""
        self.files = 0
        self._pieces: Dict[str, List[Tuple[Path, int, int]]] = {}
        self.layers: Optional[int] = None
        self._seen: Set[Path] = set()
        first = since.replace("-", "").replace(":", "")
        deadline = time.monotonic() + PATIENCE
        while True:
            for path in _tensor_files(paths):
                if path not in self._seen and path.name >= first:
                    self._seen.add(path)
                    self._index(path)
            if all(name in self._pieces for name in wanted) or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        if not self.files:
            raise Failed("no tensors file of the probe was found in " + ", ".join(paths))

    def _index(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as opened:
                about = opened.metadata() or {}
                _check_schema(path, about.get("schema"))
                if about.get("rank", "0") not in ("0", "None"):
                    return  # every rank of a tensor-parallel engine holds the same states
                self.layers = opened.get_slice("states").get_shape()[0] - 1
                lengths = opened.get_tensor("lengths").tolist()
                start = 0
                for request, rows in zip(json.loads(about["requests"]), lengths, strict=True):
                    self._pieces.setdefault(request, []).append((path, start, start + rows))
                    start += rows
        except Failed:
            raise
        except Exception as error:  # a file that is cut off raises one of many kinds
            raise Failed(f"{path.name} cannot be read as a tensors file of the probe: {error}") from error
        self.files += 1

    def sequence(
        self, request: str, layers: Sequence[int], count: Optional[int] = None
    ) -> Tuple[torch.Tensor, Dict[int, torch.Tensor]]:
        """A request's token ids [n] and its states, layer → [n, width], in the order of the positions.

        count: of its tokens; an engine that runs ahead may have forwarded drafts behind them.
        """
        tokens: Dict[int, Tuple[int, Path, int]] = {}
        for path, start, stop in self._pieces.get(request, []):
            with safe_open(path, "pt") as opened:
                ids = opened.get_slice("input_ids")[start:stop].tolist()
                places = opened.get_slice("positions")[start:stop].tolist()
            for row, (place, token) in enumerate(zip(places, ids, strict=True)):
                if count is None or place < count:
                    tokens[place] = (token, path, start + row)
        if not tokens:
            raise Failed(f"no tensors file holds the request {request}")
        expected = len(tokens) if count is None else count
        if sorted(tokens) != list(range(expected)):
            first = next(place for place in range(expected) if place not in tokens)
            raise Failed(f"the states of {request} lack position {first}: a prefix cache held it, or a file is missing")
        order = [tokens[place] for place in range(len(tokens))]
        found: Dict[int, List[torch.Tensor]] = {layer: [] for layer in layers}
        for path, first_row, last_row in _runs([(path, row) for _, path, row in order]):
            with safe_open(path, "pt") as opened:
                states = opened.get_slice("states")
                for layer in layers:
                    found[layer].append(states[layer : layer + 1, first_row : last_row + 1][0].float())
        return torch.tensor([token for token, _, _ in order]), {layer: torch.cat(found[layer]) for layer in layers}


def _check_schema(path: Path, schema: Optional[str]) -> None:
    if schema != SCHEMA:
        raise Failed(f"{path.name} follows schema {schema}, this program reads {SCHEMA}")


def _tensor_files(paths: Sequence[str]) -> List[Path]:
    """Files as given, and those of directories, in the order of their writing."""
    found: List[Path] = []
    for name in paths:
        path = Path(name)
        found += list(path.glob("*.safetensors")) if path.is_dir() else [path]
    numbered = [(path.stem.rpartition("-"), path) for path in found]
    return [
        path
        for _, path in sorted(
            numbered, key=lambda item: (item[0][0], int(item[0][2]) if item[0][2].isdigit() else 0, str(item[1]))
        )
    ]


def _runs(rows: Sequence[Tuple[Path, int]]) -> Iterator[Tuple[Path, int, int]]:
    """Consecutive rows of one file as (file, first, last)."""
    start = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index] != (rows[index - 1][0], rows[index - 1][1] + 1):
            yield rows[start][0], rows[start][1], rows[index - 1][1]
            start = index


# --- the drafter


def canonical(name: str) -> str:
    """A checkpoint's tensor name as the engine's loader reads it."""
    for old, new in LEGACY.items():
        name = name.replace(old, new)
    return name[len("model.") :] if name.startswith("model.") else name


class Drafter:
    """A drafter's settings and weights, float32 on one device; `repaired` gives one that differs in one part."""

    def __init__(self, directory: Path, target: Target, device: str) -> None:
        self.config = read_config(directory)
        self.device = device
        named = (self.config.get("architectures") or ["none"])[0]
        if named not in CLASSES:
            raise Failed(f"{directory}/config.json names the class {named}; this program computes {', '.join(CLASSES)}")
        self.notes: List[str] = []
        self.target = target
        self.weights, self.d2t, self.t2d, self.unused = self._load(read_weights(directory))
        self.count = self._count()
        self.own_head = "lm_head.weight" in self.weights
        self.own_embedding = "embed_tokens.weight" in self.weights
        wide, width = self.config.get("target_hidden_size"), int(self.config["hidden_size"])
        self.shares_embedding = wide is None or wide == width
        self._complete()
        self.head_rows = self.weights["lm_head.weight"].shape[0]
        self.tokens = self._map(self.d2t)
        self.rotation_settings = _rope_settings(self.config)
        self.norm_output = bool(self.config.get("norm_output"))
        self.depth = int(self.config.get("num_hidden_layers", 1))
        self.off: Tuple[str, ...] = ()
        self.scales = [1.0] * self.count  # of fc's blocks; a repair changes them without a copy of the weights

    def _load(self, stored: Weights) -> Tuple[Weights, Optional[torch.Tensor], Optional[torch.Tensor], List[str]]:
        weights: Weights = {}
        d2t = t2d = None
        wanted = self._wanted()
        unused = []
        for original, tensor in stored.items():
            name = canonical(original)
            if "d2t" in name:
                d2t = tensor.long()
            elif "t2d" in name:
                t2d = tensor.bool()
            elif name not in wanted and not any(f".{fused}." in name for fused in FUSED):
                unused.append(original)
            elif not tensor.is_floating_point() or tensor.element_size() < 2:
                raise Failed(f"{original} of the drafter is {tensor.dtype}: only drafters in floats are computed here")
            else:
                weights[name] = tensor.to(self.device, torch.float32)
        for name in [name for name in weights if any(f".{fused}." in name for fused in FUSED)]:
            weights.update(self._split(name, weights.pop(name)))
        return weights, d2t, t2d, unused

    def _wanted(self) -> Dict[str, bool]:
        """Every name that the engine's class has a place for → whether it cannot do without."""
        config = self.config
        eagle = config.get("eagle_config") or {}
        names = {"fc.weight": True, "norm.weight": True, "lm_head.weight": True, "embed_tokens.weight": False}
        names["fc.bias"] = bool(config.get("bias"))
        bias = bool(config.get("attention_bias") or config.get("bias"))
        for layer in range(int(config.get("num_hidden_layers", 1))):
            start = f"layers.{layer}."
            names.update({f"{start}self_attn.{part}_proj.weight": True for part in "qkvo"})
            names.update({f"{start}mlp.{part}_proj.weight": True for part in ("gate", "up", "down")})
            names.update({f"{start}{part}.weight": True for part in ("hidden_norm", "post_attention_layernorm")})
            names[f"{start}input_layernorm.weight"] = layer == 0
            if bias:
                names[f"{start}self_attn.o_proj.bias"] = True
        self.norm_before_fc = bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False)))
        self.fc_norm = bool(config.get("fc_norm") or config.get("use_aux_norm"))
        if self.norm_before_fc:
            names["input_norm.weight"] = True
        if self.fc_norm:
            names.update({f"fc_norm.{index}.weight": True for index in range(self._count())})
        return {name: needed for name, needed in names.items() if needed or not name.endswith("bias")}

    def _count(self) -> int:
        """States side by side in `fc`'s input, as the engine's class takes it."""
        given = self.config.get("num_aux_hidden_states")
        ids = (self.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        return int(given) if given is not None else len(ids) if ids else 3

    def _split(self, name: str, tensor: torch.Tensor) -> Weights:
        """A fused projection as its parts."""
        fused = next(part for part in FUSED if f".{part}." in name)
        if fused == "gate_up_proj":
            pieces = tensor.chunk(2)
        else:
            heads, kv_heads, size = self.heads()
            pieces = tensor.split([heads * size, kv_heads * size, kv_heads * size])
        return {name.replace(fused, part): piece for part, piece in zip(FUSED[fused], pieces, strict=True)}

    def heads(self) -> Tuple[int, int, int]:
        """Query heads, key heads and the width of one."""
        heads = int(self.config["num_attention_heads"])
        size = self.config.get("head_dim") or int(self.config["hidden_size"]) // heads
        return heads, int(self.config.get("num_key_value_heads") or heads), int(size)

    def _complete(self) -> None:
        """Take from the target what the engine takes from it; refuse what would be uninitialised memory there."""
        self.from_target: List[str] = []
        if not self.own_head and self.config.get("draft_vocab_size") is None:
            head = self.target.head()
            if head is None:
                raise Failed(
                    "the drafter has no lm_head of its own and uses the target's, which is not there to be read"
                )
            self.weights["lm_head.weight"] = head.to(self.device, torch.float32)
            self.from_target.append("lm_head.weight")
        for name in [name for name, needed in self._wanted().items() if needed and name not in self.weights]:
            if "norm" not in name:
                raise Failed(f"the drafter's files hold no {name}: an engine that starts all the same computes noise")
            self.weights[name] = torch.ones(self._norm_width(name), device=self.device)
            self.notes.append(f"the drafter's files hold no {name}; the engine then multiplies with ones")
        if not self.shares_embedding and not self.own_embedding:
            raise Failed(
                "target_hidden_size differs from hidden_size, so the drafter needs embed_tokens of its own, "
                "which its files do not hold"
            )
        rows, columns = self.weights["fc.weight"].shape
        wide = int(self.config.get("target_hidden_size") or self.config["hidden_size"])
        if columns != self.count * wide:
            raise Failed(f"fc.weight is {rows} x {columns}, but {self.count} states of {wide} are {self.count * wide}")

    def _norm_width(self, name: str) -> int:
        wide = int(self.config.get("target_hidden_size") or self.config["hidden_size"])
        if name == "input_norm.weight":
            return wide * self.count
        return wide if name.startswith("fc_norm") else int(self.config["hidden_size"])

    def _map(self, d2t: Optional[torch.Tensor]) -> torch.Tensor:
        """Draft id → token id, as the engine reads d2t: a difference."""
        places = torch.arange(self.head_rows)
        if d2t is None:
            return places
        if len(d2t) != self.head_rows:
            raise Failed(f"d2t has {len(d2t)} entries for a head of {self.head_rows} rows")
        return d2t + places

    # --- single parts changed

    def repaired(self, repair: Json) -> Drafter:
        """The same drafter with parts changed; what concerns the states it is fed is not looked at here."""
        changed = Drafter.__new__(Drafter)
        changed.__dict__.update(self.__dict__)
        changed.weights = dict(self.weights)
        for name, value in repair.items():
            if name in REPAIRS:
                REPAIRS[name](changed, value)
            elif name not in FEEDS:
                raise Failed(f"no repair is called {name!r}; there are {', '.join([*REPAIRS, *FEEDS])}")
        return changed

    def blocks(self) -> List[torch.Tensor]:
        """`fc`'s weight as one block per state."""
        return list(self.weights["fc.weight"].chunk(self.count, dim=1))

    # --- computing

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last axis."""
        eps = float(self.config.get("rms_norm_eps", 1e-6))
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weights[name]

    def project(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """States [n, wide] in the order of the slices → [n, hidden], as `fc` makes of them."""
        if self.norm_before_fc:
            wide = states[0].shape[-1]
            states = self.norm("input_norm.weight", torch.cat(list(states), -1)).split(wide, -1)
        if self.fc_norm:
            states = [self.norm(f"fc_norm.{index}.weight", state) for index, state in enumerate(states)]
        parts = zip(states, self.blocks(), self.scales, strict=True)
        total = sum((state @ block.T) * scale for state, block, scale in parts)
        assert isinstance(total, torch.Tensor)  # noqa: S101 - there is at least one block
        return total + self.weights["fc.bias"] if "fc.bias" in self.weights else total

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Cosines and sines for positions [n]: [n, rotary / 2] each."""
        inverse, scale, stretch = _frequencies(self.rotation_settings, self.heads()[2])
        angle = torch.outer(positions.float() / stretch, inverse)
        return (angle.cos() * scale).to(self.device), (angle.sin() * scale).to(self.device)

    def _heads_of(self, layer: int, part: str, x: torch.Tensor, rotation: Optional[Rotation]) -> torch.Tensor:
        """Project [n, width] to [heads, n, size], rotated where asked."""
        projected = x @ self.weights[f"layers.{layer}.self_attn.{part}_proj.weight"].T
        split = projected.view(len(x), -1, self.heads()[2]).transpose(0, 1)
        return _rotate(split, rotation, bool(self.rotation_settings["neox"])) if rotation else split

    def _attend(self, query: torch.Tensor, rows: torch.Tensor, past: Past, chain: Sequence[Past]) -> torch.Tensor:
        """Attention of queries [heads, m, size] at rows [m]: to the past up to their row, then to their own chain."""
        heads, kv_heads, size = self.heads()
        repeat = heads // kv_heads
        mixed = []
        for part in torch.arange(len(rows)).split(CHUNK):
            asked = query[:, part] * size**-0.5
            upto = rows[part]
            last = int(upto.max()) + 1
            keys, values = (x[:, :last].repeat_interleave(repeat, 0) for x in past)
            hidden = torch.arange(last, device=self.device) > upto.to(self.device)[:, None]
            scores = [(asked @ keys.mT).masked_fill(hidden, -math.inf)]
            own = [tuple(x[:, part].repeat_interleave(repeat, 0) for x in link) for link in chain]
            scores += [(asked * key).sum(-1, keepdim=True) for key, _ in own]
            share = torch.cat(scores, -1).softmax(-1)
            out = share[..., :last] @ values
            for index, (_, value) in enumerate(own):
                out = out + share[..., last + index : last + index + 1] * value
            mixed.append(out)
        return torch.cat(mixed, 1).transpose(0, 1).flatten(1)

    def layer(self, number: int, fed: Fed, memory: Memory) -> None:
        """One decoder layer for the rows of one step; adds the step's keys and values to the memory."""
        start = f"layers.{number}."
        if number == 0:
            residual = fed.hidden
            embedded = self.norm(start + "input_layernorm.weight", fed.embeds)
            x = torch.cat([embedded, self.norm(start + "hidden_norm.weight", residual)], -1)
        else:
            assert fed.residual is not None  # noqa: S101 - the layer before gave it
            residual = fed.hidden + fed.residual
            x = self.norm(start + "hidden_norm.weight", residual)
        here = (self._heads_of(number, "k", x, fed.rotation), self._heads_of(number, "v", x, None))
        past, chain = memory.add(number, here)
        if number == self.depth - 1 and fed.first:
            # of the rows before, nothing but keys and values is needed
            x, residual = x[fed.first :], residual[fed.first :]
            fed.drop_first()
        query = self._heads_of(number, "q", x, fed.rotation)
        mixed = self._attend(query, fed.rows, past, chain) @ self.weights[start + "self_attn.o_proj.weight"].T
        if start + "self_attn.o_proj.bias" in self.weights:
            mixed = mixed + self.weights[start + "self_attn.o_proj.bias"]
        residual = residual if "attention" in self.off else residual + mixed
        x = self.norm(start + "post_attention_layernorm.weight", residual)
        gate = silu(x @ self.weights[start + "mlp.gate_proj.weight"].T)
        out = (gate * (x @ self.weights[start + "mlp.up_proj.weight"].T)) @ self.weights[
            start + "mlp.down_proj.weight"
        ].T
        fed.hidden, fed.residual = (torch.zeros_like(out) if "mlp" in self.off else out), residual

    def step(self, fed: Fed, memory: Memory) -> Tuple[torch.Tensor, torch.Tensor]:
        """All layers for one step → the normed state for the head, and the state that the next step is fed.

        Both for the rows from `fed.first` on.
        """
        for number in range(self.depth):
            self.layer(number, fed, memory)
        assert fed.residual is not None  # noqa: S101 - there is at least one layer
        total = fed.hidden + fed.residual
        normed = self.norm("norm.weight", total)
        return normed, normed if self.norm_output else total

    def guess(self, normed: torch.Tensor, topk: int) -> torch.Tensor:
        """The tokens that the head likes best, [n, topk], best first."""
        head = self.weights["lm_head.weight"]
        best = [(part @ head.T).topk(min(topk, head.shape[0]), -1).indices.cpu() for part in normed.split(CHUNK)]
        return self.tokens[torch.cat(best)]


Past = Tuple[torch.Tensor, torch.Tensor]


class Fed:
    """What the rows of one step are fed: rows [m] (their row of step 0), hidden and embeds [m, width], and how many
    of the first rows draft nothing themselves."""

    def __init__(self, rows: torch.Tensor, hidden: torch.Tensor, embeds: torch.Tensor, rotation: Rotation) -> None:
        self.rows, self.hidden, self.embeds, self.rotation = rows, hidden, embeds, rotation
        self.residual: Optional[torch.Tensor] = None
        self.first = 0

    def drop_first(self) -> None:
        """Go on with the rows that draft."""
        self.rows = self.rows[self.first :]
        self.rotation = (self.rotation[0][self.first :], self.rotation[1][self.first :])
        self.first = 0


class Memory:
    """Keys and values, per layer: those of step 0 for all rows, then those of each later step of the chain."""

    def __init__(self) -> None:
        self._steps: Dict[int, List[Past]] = {}

    def add(self, layer: int, here: Past) -> Tuple[Past, List[Past]]:
        """Add a step's keys and values; the first is what all see, the others only what their own row sees."""
        steps = self._steps.setdefault(layer, [])
        steps.append(here)
        return steps[0], steps[1:]


def _rotate(x: torch.Tensor, rotation: Rotation, neox: bool) -> torch.Tensor:
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


def _rope_settings(config: Json) -> Json:
    """Theta, scaling and style, from whichever of the two spellings of a config is used."""
    parameters = config.get("rope_parameters") or {}
    scaling = {**(config.get("rope_scaling") or {}), **parameters}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    original = config.get("original_max_position_embeddings")
    return {
        "theta": float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "kind": "default" if kind == "mrope" else kind,
        "scaling": {**scaling, **({"original_max_position_embeddings": original} if original else {})},
        "neox": bool(config.get("rope_is_neox_style", True)),
        "share": float(config.get("partial_rotary_factor") or 1.0),
        "longest": int(config.get("max_position_embeddings", 8192)),
    }


def _frequencies(settings: Json, size: int) -> Tuple[torch.Tensor, float, float]:
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
    if kind == "yarn":
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

    def size(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    both = scaling.get("mscale"), scaling.get("mscale_all_dim")
    scale = size(1.0) if None in both else size(float(both[0] or 0)) / size(float(both[1] or 0))
    return inverse, scale * float(scaling.get("attn_factor", 1)), 1.0


# --- repairs: what may be changed in one part of a drafter

FEEDS = ("shift", "shuffle", "skip_fc")  # changes to what the drafter is fed


def _fc_scale(drafter: Drafter, factors: List[float]) -> None:
    if len(factors) != drafter.count:
        raise Failed(f"fc has {drafter.count} blocks, and {len(factors)} factors are given")
    drafter.scales = list(factors)


def _d2t(drafter: Drafter, source: str) -> None:
    if source == "none":
        drafter.tokens = drafter._map(None)
    elif source == "absolute" and drafter.d2t is not None:
        drafter.tokens = drafter.d2t
    elif source == "t2d" and drafter.t2d is not None:
        drafter.tokens = _from_t2d(drafter)
    elif source == "head":
        drafter.tokens = nearest_rows(drafter)
    else:
        raise Failed(f"d2t cannot be taken from {source!r}: the drafter's files do not hold it")


def _from_t2d(drafter: Drafter) -> torch.Tensor:
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
        drafter.rotation_settings = {**_rope_settings(drafter.target.config), "share": 1.0}
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


# --- drafting along a sequence


class Replayed:
    """One replayed request: tokens [n], states by layer, and how many tokens were the prompt's."""

    def __init__(self, tokens: torch.Tensor, states: Dict[int, torch.Tensor], prompt: int) -> None:
        self.tokens, self.states, self.prompt = tokens, states, prompt


def fed_states(sequence: Replayed, layers: Sequence[int], repair: Json) -> List[torch.Tensor]:
    """The states of the chosen layers, with what a fault of serving may have done to them."""
    states = [sequence.states[layer] for layer in layers]
    if repair.get("shuffle"):
        order = torch.randperm(len(sequence.tokens), generator=torch.Generator().manual_seed(1))
        states = [state[order] for state in states]
    shifts = repair.get("shift") or [0] * len(states)
    return [
        torch.cat([state[:1].expand(shift, -1), state[: len(state) - shift]]) if shift else state
        for state, shift in zip(states, shifts, strict=True)
    ]


def draft(drafter: Drafter, sequence: Replayed, states: List[torch.Tensor], steps: int, topk: int) -> torch.Tensor:
    """Rank of the right token among the drafts, [rows that draft, steps]; topk when not among them, -1 when the
    sequence ends before. Row r drafts from prompt - 1 + r on; each step is fed the right tokens of those before.
    """
    tokens, device = sequence.tokens, drafter.device
    count = len(tokens) - 1  # the last token has no successor to draft for
    if drafter.shares_embedding:
        embeds = sequence.states[0].to(device)
    else:
        embeds = drafter.weights["embed_tokens.weight"][tokens.to(device)]
    rows = torch.arange(count)
    kept = rows[sequence.prompt - 1 :]
    hidden = drafter.project([state[:count].to(device) for state in states])
    memory = Memory()
    ranks = torch.full((len(kept), steps), -1)
    for step in range(steps):
        active = rows if step == 0 else kept
        there = (active + step + 1).clamp(max=len(tokens) - 1)
        fed = Fed(active, hidden, embeds[there.to(device)], drafter.rotation(active + step))
        fed.first = sequence.prompt - 1 if step == 0 else 0
        normed, hidden = drafter.step(fed, memory)
        guesses = drafter.guess(normed, topk)
        known = kept + step + 2 < len(tokens)
        right = tokens[(kept + step + 2).clamp(max=len(tokens) - 1)]
        hit = guesses == right[:, None]
        rank = torch.where(hit.any(-1), hit.int().argmax(-1), torch.full_like(right, topk))
        ranks[:, step] = torch.where(known, rank, torch.full_like(rank, -1))
    return ranks


def accept(ranks: torch.Tensor, within: int) -> Json:
    """Verifications over the whole answer. within: a draft counts when its rank is below that (1: a chain)."""
    rows, steps = ranks.shape
    tokens = rows + 1  # the first token is the prefill's
    histogram = [0] * (steps + 1)
    reached, passed = [0] * steps, [0] * steps
    known, verifications = 1, 0
    while known < tokens:
        accepted = 0
        for rank in ranks[known - 1].tolist():
            if rank < 0:
                break
            reached[accepted] += 1
            if rank >= within:
                break
            passed[accepted] += 1
            accepted += 1
        histogram[accepted] += 1
        verifications += 1
        known += accepted + 1
    return {
        "tokens": tokens,
        "verifications": verifications,
        "histogram": histogram,
        "reached": reached,
        "passed": passed,
        "length": round(tokens / verifications, 4) if verifications else None,
    }


def summary(results: Sequence[Json]) -> Json:
    """Over all sequences: tokens a verification, and the share of verifications that accept 1, 2, … drafts."""
    total = sum(result["verifications"] for result in results)
    shares, product = [], 1.0
    for step in range(len(results[0]["reached"]) if results else 0):
        reached = sum(result["reached"][step] for result in results)
        product *= sum(result["passed"][step] for result in results) / reached if reached else 0.0
        shares.append(round(product, 4))
    return {
        "length": round(sum(result["tokens"] for result in results) / total, 4) if total else None,
        "per_position": shares,
        "verifications": total,
    }


# --- what the parts themselves tell


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
        "target_rope": _rope_settings(drafter.target.config) if drafter.target.config else None,
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
    marked = None if t2d is None or int(t2d.sum()) != drafter.head_rows else _from_t2d(drafter)
    answer["agrees_with_t2d"] = None if marked is None else bool((drafter.tokens == marked).all())
    if d2t is None:
        return answer
    tokens = drafter.tokens
    answer["zero"] = not bool(d2t.any())
    answer["different_tokens"] = len(tokens.unique())
    answer["outside"] = int(((tokens < 0) | (tokens >= size)).sum()) if size else None
    answer["ascending_as_absolute"] = bool((d2t[1:] > d2t[:-1]).all())
    return answer


def _embedding(drafter: Drafter, sequence: Replayed) -> Json:
    """Whether the drafter's own embedding, where it has one, is the target's: relative distance on the tokens seen."""
    answer: Json = {"own": drafter.own_embedding, "used": not drafter.shares_embedding, "distance": None}
    if drafter.own_embedding:
        own = drafter.weights["embed_tokens.weight"][sequence.tokens.to(drafter.device)].cpu()
        seen = sequence.states[0]
        if own.shape == seen.shape:
            answer["distance"] = round(float((own - seen).norm() / seen.norm()), 6)
    return answer


# --- a sample of the drafter's training


MASK_NAMES = ("attention_mask", "padding_mask")
TOKEN_NAMES = ("input_id", "token_id", "input_token", "tokens", "ids", "token")
NOT_TOKENS = ("label", "mask", "position", "target", "len", "index")


class Sample:
    """A stored training sample: token ids, and floating tensors that hold states for each of them.

    Names, order and packing are whatever the trainer wrote: what a tensor is follows from its type, its shape and its
    numbers; a name only decides where those leave a choice.
    """

    def __init__(self, path: Path, width: int) -> None:
        self.width = width
        self.tensors = _flat(_load_sample(path))
        name = self._find_tokens()
        self.tokens_name = name
        tokens = self.tensors[name].long()
        self.shape = tuple(size for size in tokens.shape if size > 1) or (tokens.numel(),)
        if len(self.shape) > 2:
            raise Failed(f"{name} of the sample has the shape {list(tokens.shape)}: one or two axes are understood")
        self.tokens = tokens.reshape(self.shape if len(self.shape) == 2 else (1, -1))
        scope = name.rpartition(".")[0]
        self.states = {
            other: tensor
            for other, tensor in self.tensors.items()
            if tensor.is_floating_point() and (not scope or other.startswith(scope + ".")) and self.layouts(tensor)
        }
        if not self.states:
            raise Failed(
                f"no tensor of the sample holds states of the {self.tokens.numel()} tokens of {name} for a target of "
                f"the width {width}; there are {_shapes(self.tensors)}"
            )

    def _find_tokens(self) -> str:
        """The integer tensor that holds the token ids."""
        found = []
        for name, tensor in self.tensors.items():
            if tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.numel() < 2:
                continue
            values = tensor.flatten()
            counted = bool((values[1:] - values[:-1] == 1).float().mean() > 0.9)
            if int(values.min()) < 0 or int(values.max()) < 2 or counted:
                continue  # labels, a mask, positions
            last = name.rpartition(".")[2].lower()
            hint = next((len(TOKEN_NAMES) - n for n, part in enumerate(TOKEN_NAMES) if part in last), 0)
            hint -= 10 * any(part in last for part in NOT_TOKENS)
            found.append((hint, tensor.numel(), name))
        if not found:
            raise Failed(f"the sample holds no token ids; there are {_shapes(self.tensors)}")
        best = max(hint for hint, _, _ in found)
        return max((item for item in found if item[0] == best), key=lambda item: item[1])[2]

    def layouts(self, tensor: torch.Tensor) -> List[Tuple[int, ...]]:
        """Orders of axes (those of size 1 left out) that give [batch, tokens, …, width] or [all tokens, …, width]."""
        batch, length = self.tokens.shape
        shape = tensor.squeeze().shape
        found = []
        for order in permutations(range(len(shape))):
            *lead, last = [shape[axis] for axis in order] or [0]
            rest = lead[2:] if lead[:2] == [batch, length] else lead[1:] if lead[:1] == [batch * length] else None
            if last and last % self.width == 0 and rest is not None and len(rest) < 2:
                found.append(order)
        return found

    def views(self, name: str, row: int, start: int, stop: int) -> List[torch.Tensor]:
        """The rows of one sequence of a stored tensor as [tokens, states, width], in every way its shape allows."""
        squeezed, (batch, length) = self.states[name].squeeze(), self.tokens.shape
        found = []
        for order in self.layouts(squeezed):
            turned = squeezed.permute(order)
            by_row = tuple(turned.shape[:2]) == (batch, length)
            rows = turned[row, start:stop] if by_row else turned[row * length + start : row * length + stop]
            found.append(rows.reshape(stop - start, -1, self.width).float())
        return found

    def sequences(self, count: int, longest: int) -> List[Tuple[int, int, int]]:
        """The first sequences as (batch row, first, last + 1), without padding and cut at what is packed together."""
        found = []
        for row in range(len(self.tokens)):
            for start, stop in self._pieces(row):
                if stop - start > 1:
                    found.append((row, start, min(stop, start + longest)))
        return found[:count]

    def _pieces(self, row: int) -> List[Tuple[int, int]]:
        length = self.tokens.shape[1]
        starts = {0}
        kept = torch.ones(length, dtype=torch.bool)
        for name, tensor in self.tensors.items():
            last = name.rpartition(".")[2].lower()
            if tensor.is_floating_point():
                continue
            values = tensor.reshape(-1).long() if tensor.numel() != self.tokens.numel() else None
            same = tensor.reshape(self.tokens.shape)[row].long() if values is None else None
            if same is not None and any(part in last for part in MASK_NAMES):
                kept &= same != 0
            elif same is not None and "position" in last:
                starts |= set((same == 0).nonzero().flatten().tolist())
            elif values is not None and len(self.tokens) == 1 and "len" in last:
                ends = values if int(values[0]) == 0 else torch.cat([values.new_zeros(1), values.cumsum(0)])
                if int(ends[-1]) == length:
                    starts |= set(ends[:-1].tolist())
        edges = [*sorted(starts), length]
        pieces = []
        for first, last_one in pairwise(edges):
            inside = kept[first:last_one].nonzero().flatten().tolist()
            if inside:
                pieces.append((first + inside[0], first + inside[-1] + 1))
        return pieces


def _load_sample(path: Path) -> Any:
    """What a file holds, loaded as weights only."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle and safetensors raise many kinds, all mean the same here
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Failed(f"{path.name} cannot be read as safetensors or, weights only, by torch: {reason}") from error


def _flat(value: Any, name: str = "") -> Dict[str, torch.Tensor]:
    """Nested mappings and lists as one mapping of dotted names; lists of numbers become tensors."""
    if isinstance(value, torch.Tensor):
        return {name or "tensor": value}
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return {name: torch.tensor(value)}
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {}
    found: Dict[str, torch.Tensor] = {}
    for key, item in items:
        found.update(_flat(item, f"{name}.{key}" if name else key))
    return found


def _shapes(tensors: Dict[str, torch.Tensor]) -> str:
    shown = [f"{name} {list(tensor.shape)}" for name, tensor in list(tensors.items())[:8]]
    return ", ".join(shown) + (", …" if len(tensors) > len(shown) else "") or "no tensors at all"


def _sample(asked: Json) -> Tuple[Sample, Target]:
    if not asked.get("target"):
        raise Failed("a sample can be compared only where the target's directory is known: set debug_probes_target")
    target = Target(Path(asked["target"]))
    width = target.config.get("hidden_size")
    if not width:
        raise Failed(f"{asked['target']}/config.json names no hidden_size")
    return Sample(Path(asked["sample"]), int(width)), target


def read_sample(asked: Json) -> Json:
    """The token ids to replay, by a name for each sequence; and what the sample holds."""
    sample, target = _sample(asked)
    chosen = sample.sequences(int(asked.get("count") or 2), int(asked.get("longest") or 256))
    vocabulary = target.config.get("vocab_size")
    if vocabulary and int(sample.tokens.max()) >= int(vocabulary):
        raise Failed(
            f"{sample.tokens_name} of the sample holds the token {int(sample.tokens.max())}, the target's vocabulary "
            f"ends at {vocabulary}: the sample is of another target"
        )
    return {
        "format": FORMAT,
        "tokens": sample.tokens_name,
        "states": {name: list(tensor.shape) for name, tensor in sample.states.items()},
        "sequences": {
            f"sample-{index}": sample.tokens[row, start:stop].tolist()
            for index, (row, start, stop) in enumerate(chosen)
        },
    }


def match_sample(asked: Json) -> Json:
    """For every state that the sample stores, how far each layer's state of the server is from it."""
    sample, target = _sample(asked)
    chosen = sample.sequences(int(asked.get("count") or 2), int(asked.get("longest") or 256))
    names = [f"pivot-replay-sample-{index}" for index in range(len(chosen))]
    recorded = States(asked["tensors"], asked.get("since", ""), names)
    assert recorded.layers is not None  # noqa: S101 - there is at least one file
    layers = list(range(recorded.layers + 1))
    norm, eps = target.tensor("model.norm.weight", "norm.weight"), float(target.config.get("rms_norm_eps", 1e-6))
    distances: Dict[str, List[List[torch.Tensor]]] = {}
    for index, (row, start, stop) in enumerate(chosen):
        _, served = recorded.sequence(names[index], layers, stop - start)
        known = [served[layer] for layer in layers]
        if norm is not None and norm.shape == known[-1].shape[-1:]:
            last = known[-1]
            known.append(last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + eps) * norm.float())
        for name in sample.states:
            views = sample.views(name, row, start, stop)
            distances.setdefault(name, []).append([_distances(view, known) for view in views])
    return {
        "format": FORMAT,
        "layers": recorded.layers,
        "rows": sum(stop - start for _, start, stop in chosen),
        "tokens": sample.tokens_name,
        "tensors": [_matched(name, sample.states[name], found, recorded.layers) for name, found in distances.items()],
    }


SHIFTS = (0, 1, -1)


def _distances(stored: torch.Tensor, known: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stored [tokens, states, width] against known [tokens, width]: [states, shifts, known], the median over the tokens
    of the distance relative to the known state. Shift s: the stored state of a token is the known one s before."""
    found = torch.empty(stored.shape[1], len(SHIFTS), len(known))
    for place, shift in enumerate(SHIFTS):
        for index, state in enumerate(known):
            first, second = stored[max(shift, 0) : len(stored) + min(shift, 0)], state
            second = second[max(-shift, 0) : len(state) - max(shift, 0)]
            apart = (first - second[:, None]).norm(dim=-1) / second.norm(dim=-1).clamp(min=1e-9)[:, None]
            found[:, place, index] = apart.median(0).values
    return found


def _matched(name: str, tensor: torch.Tensor, found: List[List[torch.Tensor]], layers: int) -> Json:
    """A stored tensor's nearest states, in the layout that lies nearest."""
    by_view = [torch.stack(parts).mean(0) for parts in zip(*found, strict=True)]
    best = min(by_view, key=lambda view: float(view.flatten(1).min(1).values.mean()))
    pieces = []
    for index, piece in enumerate(best):
        place = int(piece.min(1).values.argmin())
        order = piece[place].argsort().tolist()
        first, second = order[0], next(other for other in order[1:] if {order[0], other} != {layers, layers + 1})
        pieces.append(
            {
                "index": index,
                "layer": min(first, layers),
                "normed": first > layers,
                "distance": round(float(piece[place][first]), 7),
                "second": min(second, layers),
                "second_distance": round(float(piece[place][second]), 7),
                "shift": SHIFTS[place],
            }
        )
    return {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).rpartition(".")[2], "pieces": pieces}


# --- the whole


def evaluate(asked: Json) -> Json:
    """The answer to one question (see the top of this file)."""
    started = time.monotonic()
    device = str(asked.get("device") or "cpu")
    torch.set_num_threads(int(asked.get("threads") or 0) or os.cpu_count() or 1)
    steps, topk = int(asked.get("steps") or 3), int(asked.get("topk") or 1)
    place = Path(asked["target"]) if asked.get("target") else None
    target = Target(place if place and place.is_dir() else None)
    drafter = Drafter(Path(asked["drafter"]), target, device)
    states = States(asked["tensors"], asked.get("since", ""), [entry["rid"] for entry in asked["sequences"]])
    assert states.layers is not None  # noqa: S101 - there is at least one file
    candidates, left_out = _prepare(drafter, asked["candidates"], states.layers)
    wanted = sorted({layer for _, _, layers, _ in candidates for layer in layers} | {0})
    results: List[List[Json]] = [[] for _ in candidates]
    wide: List[List[Json]] = [[] for _ in candidates]
    notes, ids = list(drafter.notes), []
    if place and not place.is_dir():
        notes.append(f"the target is no directory of this host ({place}): its head is not tried in the drafter's place")
    embedding: Json = {}
    for entry in asked["sequences"]:
        try:
            tokens, kept = states.sequence(entry["rid"], wanted, entry.get("tokens"))
        except Failed as error:
            notes.append(str(error))
            continue
        sequence = Replayed(tokens, kept, int(entry["prompt_tokens"]))
        if len(tokens) - sequence.prompt < 2:
            notes.append(f"the answer to {entry['id']} has fewer than two tokens: nothing is drafted there")
            continue
        ids.append(entry["id"])
        embedding = embedding or _embedding(drafter, sequence)
        for index, (_, changed, layers, repair) in enumerate(candidates):
            ranks = draft(changed, sequence, fed_states(sequence, layers, repair), steps, topk)
            results[index].append(accept(ranks, 1))
            wide[index].append(accept(ranks, topk))
    if not ids:
        raise Failed("no sequence could be evaluated: " + "; ".join(notes[:3]))
    return {
        "format": FORMAT,
        "steps": steps,
        "topk": topk,
        "layers": states.layers,
        "sequences": ids,
        "candidates": [
            {
                "name": candidate[0],
                "layers": candidate[2],
                "repair": candidate[3],
                **summary(found),
                **({"at_most": summary(wide[index])["length"]} if topk > 1 else {}),
                "sequences": found,
            }
            for index, (candidate, found) in enumerate(zip(candidates, results, strict=True))
        ],
        "left_out": left_out,
        "parts": {**parts(drafter, target.config.get("vocab_size")), "embedding": embedding},
        "notes": notes,
        "files": states.files,
        "seconds": round(time.monotonic() - started, 2),
    }


def _prepare(
    drafter: Drafter, asked: Sequence[Json], layers: int
) -> Tuple[List[Tuple[str, Drafter, List[int], Json]], List[Json]]:
    """Candidates as (name, drafter, layers, repair), and those that cannot be evaluated, with the reason."""
    ready, left_out = [], []
    for candidate in asked:
        chosen, repair = [int(layer) for layer in candidate["layers"]], candidate.get("repair") or {}
        reason = ""
        if len(chosen) != drafter.count:
            reason = f"fc takes {drafter.count} states"
        elif not all(0 <= layer <= layers for layer in chosen):
            reason = f"the target has the layer inputs 0 to {layers - 1}"
        else:
            try:
                ready.append((str(candidate["name"]), drafter.repaired(repair), chosen, repair))
            except Failed as error:
                reason = str(error)
        if reason:
            left_out.append({"name": candidate["name"], "reason": reason})
    if not ready:
        raise Failed("no candidate can be evaluated: " + "; ".join(item["reason"] for item in left_out[:3]))
    return ready, left_out


ACTIONS: Dict[str, Callable[[Json], Json]] = {
    "evaluate": evaluate,
    "read sample": read_sample,
    "match sample": match_sample,
}


def main(arguments: List[str]) -> int:
    """Print the answer; 3 with a sentence when there is none."""
    if len(arguments) != 2:
        print(json.dumps({"failed": "whatif.py takes one argument, a JSON object"}))
        return FAILED
    try:
        asked = json.loads(arguments[1])
        with torch.inference_mode():
            answer = ACTIONS[asked.get("do", "evaluate")](asked)
    except Failed as error:
        print(json.dumps({"failed": str(error)}))
        return FAILED
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

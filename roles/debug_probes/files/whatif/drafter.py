"""What the drafters of all classes have in common: loading, single parts changed, layers and steps.

The order of the arithmetic is SGLang's. What a class has of its own (its attention, names, what it takes from the
target) is in `whatif.classes`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch.nn.functional import silu

from whatif.files import Failed, Json, Target, Weights, read_config, read_weights
from whatif.rope import Rotation, frequencies

CHUNK = 256  # rows for which attention scores or logits exist at one time
Past = Tuple[torch.Tensor, torch.Tensor]


class Drafter:
    """A drafter's settings and weights, float32 on one device; `repaired` gives one that differs in one part."""

    LEGACY: ClassVar[Mapping[str, str]] = {"midlayer": "layers.0"}
    FUSED: ClassVar[Mapping[str, Tuple[str, ...]]] = {"gate_up_proj": ("gate_proj", "up_proj")}
    # where the class takes the target's head although the drafter's files hold one
    HEAD_OF_TARGET_FIRST: ClassVar[bool] = False

    # set by the classes
    rotary: int
    scale: float
    rotation_settings: Json

    def __init__(self, directory: Path, target: Target, device: str) -> None:
        self.config = read_config(directory)
        self.device = device
        self.notes: List[str] = []
        self.target = target
        self.depth = int(self.config.get("num_hidden_layers", 1))
        self.fc_norm = bool(self.config.get("fc_norm") or self.config.get("use_aux_norm"))
        self.norm_output = bool(self.config.get("norm_output"))
        self.width = int(self.config["hidden_size"])
        self.wide = int(self.config.get("target_hidden_size") or self.width)
        self.shares_embedding = self.wide == self.width
        self._prepare()
        self.count = self._states_of_fc()
        self.weights, self.d2t, self.t2d, self.unused = self._load(read_weights(directory))
        self.own_head = "lm_head.weight" in self.weights
        self.own_embedding = "embed_tokens.weight" in self.weights
        self._complete()
        self.head_rows = self.weights["lm_head.weight"].shape[0]
        self.tokens = self.token_map(self.d2t)
        self.off: Tuple[str, ...] = ()
        self.scales = [1.0] * self.count  # of fc's blocks; a repair changes them without a copy of the weights

    # --- what a class has of its own

    def _prepare(self) -> None:
        """Read the class's settings, before any weight; a Failed says what the engine's class refuses."""
        raise NotImplementedError

    def rope_of(self, config: Json) -> Json:
        """A model's rotary settings as this class reads them."""
        raise NotImplementedError

    def turn_as(self, config: Json) -> None:
        """Take the rotary settings of a model's config."""
        self.rotation_settings = self.rope_of(config)

    def _states_of_fc(self) -> int:
        """States side by side in `fc`'s input."""
        raise NotImplementedError

    def _projections(self, layer: int) -> Dict[str, bool]:
        """The attention's names behind `self_attn.` → whether the class cannot do without."""
        raise NotImplementedError

    def _more_names(self) -> Dict[str, bool]:
        """Names outside the layers that only this class has."""
        return {}

    def _query(self, layer: int, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[n, width] as [heads, n, size]."""
        raise NotImplementedError

    def _keys_values(self, layer: int, x: torch.Tensor, rotation: Rotation) -> Past:
        """[n, width] as keys [groups, n, size] and values [groups, n, value size]."""
        raise NotImplementedError

    def _join(self, states: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What the class does to the states before `fc`, besides a norm for each."""
        return states

    def _split(self, fused: str, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """A fused projection as its parts."""
        return tensor.chunk(len(self.FUSED[fused]))

    # --- loading

    def canonical(self, name: str) -> str:
        """A checkpoint's tensor name as the engine's loader reads it."""
        for old, new in self.LEGACY.items():
            name = name.replace(old, new)
        return name[len("model.") :] if name.startswith("model.") else name

    def _load(self, stored: Weights) -> Tuple[Weights, Optional[torch.Tensor], Optional[torch.Tensor], List[str]]:
        weights: Weights = {}
        d2t = t2d = None
        wanted = self._wanted()
        unused = []
        for original, tensor in stored.items():
            name = self.canonical(original)
            if "d2t" in name:
                d2t = tensor.long()
            elif "t2d" in name:
                t2d = tensor.bool()
            elif name not in wanted and not any(f".{fused}." in name for fused in self.FUSED):
                unused.append(original)
            elif not tensor.is_floating_point() or tensor.element_size() < 2:
                raise Failed(f"{original} of the drafter is {tensor.dtype}: only drafters in floats are computed here")
            else:
                weights[name] = tensor.to(self.device, torch.float32)
        for fused, names in self.FUSED.items():
            for name in [name for name in weights if f".{fused}." in name]:
                pieces = self._split(fused, weights.pop(name))
                weights.update({name.replace(fused, part): piece for part, piece in zip(names, pieces, strict=True)})
        return weights, d2t, t2d, unused

    def _wanted(self) -> Dict[str, bool]:
        """Every name that the engine's class has a place for → whether it cannot do without."""
        names = {"fc.weight": True, "norm.weight": True, "lm_head.weight": True, "embed_tokens.weight": False}
        if self.config.get("bias"):
            names["fc.bias"] = True
        for layer in range(self.depth):
            start = f"layers.{layer}."
            names.update({f"{start}self_attn.{part}": needed for part, needed in self._projections(layer).items()})
            names.update({f"{start}mlp.{part}_proj.weight": True for part in ("gate", "up", "down")})
            names.update({f"{start}{part}.weight": True for part in ("hidden_norm", "post_attention_layernorm")})
            names[f"{start}input_layernorm.weight"] = layer == 0
        if self.fc_norm:
            names.update({f"fc_norm.{index}.weight": True for index in range(self.count)})
        return {**names, **self._more_names()}

    def _complete(self) -> None:
        """Take from the target what the engine takes from it; refuse what would be uninitialised memory there."""
        self.from_target: List[str] = []
        if self.config.get("draft_vocab_size") is None and (self.HEAD_OF_TARGET_FIRST or not self.own_head):
            head = self.target.head()
            if head is None:
                raise Failed("the engine gives this drafter the target's lm_head, which is not there to be read")
            self.weights["lm_head.weight"] = head.to(self.device, torch.float32)
            self.own_head = False
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
        if columns != self.count * self.wide:
            wanted = f"{self.count} states of {self.wide} are {self.count * self.wide}"
            raise Failed(f"fc.weight is {rows} x {columns}, but {wanted}")

    def _norm_width(self, name: str) -> int:
        """Entries of a norm's weight."""
        return self.wide if name.startswith("fc_norm") else self.width

    def token_map(self, d2t: Optional[torch.Tensor]) -> torch.Tensor:
        """Draft id → token id, as the engine reads d2t: a difference."""
        places = torch.arange(self.head_rows)
        if d2t is None:
            return places
        if len(d2t) != self.head_rows:
            raise Failed(f"d2t has {len(d2t)} entries for a head of {self.head_rows} rows")
        return d2t + places

    def changed(self) -> Drafter:
        """A copy whose parts can be replaced; the tensors are shared."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.weights = dict(self.weights)
        return copied

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
        states = self._join(states)
        if self.fc_norm:
            states = [self.norm(f"fc_norm.{index}.weight", state) for index, state in enumerate(states)]
        parts = zip(states, self.blocks(), self.scales, strict=True)
        total = sum((state @ block.T) * scale for state, block, scale in parts)
        assert isinstance(total, torch.Tensor)  # noqa: S101 - there is at least one block
        return total + self.weights["fc.bias"] if "fc.bias" in self.weights else total

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Cosines and sines for positions [n]: [n, rotary / 2] each."""
        inverse, scale, stretch = frequencies(self.rotation_settings, self.rotary)
        angle = torch.outer(positions.float() / stretch, inverse)
        return (angle.cos() * scale).to(self.device), (angle.sin() * scale).to(self.device)

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
        past, chain = memory.add(number, self._keys_values(number, x, fed.rotation))
        if number == self.depth - 1 and fed.first:
            # of the rows before, nothing but keys and values is needed
            x, residual = x[fed.first :], residual[fed.first :]
            fed.drop_first()
        mixed = attend(self._query(number, x, fed.rotation) * self.scale, fed.rows, past, chain)
        mixed = mixed @ self.weights[start + "self_attn.o_proj.weight"].T
        if start + "self_attn.o_proj.bias" in self.weights:
            mixed = mixed + self.weights[start + "self_attn.o_proj.bias"]
        residual = residual if "attention" in self.off else residual + mixed
        out = self._mlp(start + "mlp.", self.norm(start + "post_attention_layernorm.weight", residual))
        fed.hidden, fed.residual = (torch.zeros_like(out) if "mlp" in self.off else out), residual

    def _mlp(self, start: str, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.weights[f"{start}{part}_proj.weight"].T for part in ("gate", "up", "down"))
        return (silu(x @ gate) * (x @ up)) @ down

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


def attend(query: torch.Tensor, rows: torch.Tensor, past: Past, chain: Sequence[Past]) -> torch.Tensor:
    """Attention of scaled queries [heads, m, size] at rows [m]: to the past up to their row, then to their own chain.

    Heads share the past's groups in turn; the result is [m, heads x value size].
    """
    repeat = len(query) // len(past[0])
    mixed = []
    for part in torch.arange(len(rows)).split(CHUNK):
        asked, upto = query[:, part], rows[part]
        last = int(upto.max()) + 1
        keys, values = (x[:, :last].repeat_interleave(repeat, 0) for x in past)
        hidden = torch.arange(last, device=query.device) > upto.to(query.device)[:, None]
        scores = [(asked @ keys.mT).masked_fill(hidden, -math.inf)]
        own = [tuple(x[:, part].repeat_interleave(repeat, 0) for x in link) for link in chain]
        scores += [(asked * key).sum(-1, keepdim=True) for key, _ in own]
        share = torch.cat(scores, -1).softmax(-1)
        out = share[..., :last] @ values
        for index, (_, value) in enumerate(own):
            out = out + share[..., last + index : last + index + 1] * value
        mixed.append(out)
    return torch.cat(mixed, 1).transpose(0, 1).flatten(1)


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

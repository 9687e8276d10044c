"""A sample of the drafter's training: read, whatever its names and packing, and matched with recorded states."""

from __future__ import annotations

from itertools import pairwise, permutations
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import torch
from safetensors import safe_open

from whatif.files import FORMAT, Failed, Json, Target
from whatif.states import States

MASK_NAMES = ("attention_mask", "padding_mask")
TOKEN_NAMES = ("input_id", "token_id", "input_token", "tokens", "ids", "token")
NOT_TOKENS = ("label", "mask", "position", "target", "len", "index")
SHIFTS = (0, 1, -1)
RUN = 4  # as many equal tokens at the end of a sequence are padding that no mask tells of


class Sample:
    """A stored training sample: token ids, and floating tensors that hold states for each of them.

    Names, order and packing are whatever the trainer wrote: what a tensor is follows from its type, its shape and its
    numbers; a name only decides where those leave a choice.
    """

    def __init__(self, path: Path, width: int) -> None:
        self.width = width
        self.tensors = _flat(load_sample(path))
        name = self._find_tokens()
        self.tokens_name = name
        tokens = self.tensors[name]
        self.shape = tuple(size for size in tokens.shape if size > 1) or (tokens.numel(),)
        if len(self.shape) > 2:
            raise Failed(f"{name} of the sample has the shape {list(tokens.shape)}: one or two axes are understood")
        self.tokens = tokens.reshape(self.shape if len(self.shape) == 2 else (1, -1))
        self.order = self._find_order()
        self.tokens = self.tokens.gather(1, self.order)
        self.states = self._find_states(name)
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
            last = _word(name)
            hint = next((len(TOKEN_NAMES) - n for n, part in enumerate(TOKEN_NAMES) if part in last), 0)
            hint -= 10 * any(part in last for part in NOT_TOKENS)
            found.append((hint, tensor.numel(), name))
        if not found:
            raise Failed(f"the sample holds no token ids; there are {_shapes(self.tensors)}")
        best = max(hint for hint, _, _ in found)
        return max((item for item in found if item[0] == best), key=lambda item: item[1])[2]

    def _find_order(self) -> torch.Tensor:
        """Where the tokens of each sequence stand, in the order of their positions: [batch, tokens]."""
        order = torch.arange(self.tokens.shape[1]).repeat(len(self.tokens), 1)
        for name, tensor in self.tensors.items():
            if "position" in _word(name) and tensor.numel() == self.tokens.numel():
                positions = tensor.reshape(self.tokens.shape)
                if torch.equal(positions.sort(1).values, order):
                    return positions.argsort(1)
        return order

    def _find_states(self, tokens: str) -> Dict[str, torch.Tensor]:
        """The tensors that hold states of these tokens: those that are stored nearest to them, as in a list of samples
        each one has its own."""
        fitting = {
            name: tensor for name, tensor in self.tensors.items() if tensor.is_floating_point() and self.layouts(tensor)
        }
        scope = tokens
        while scope:
            scope = scope.rpartition(".")[0]
            found = {name: tensor for name, tensor in fitting.items() if not scope or name.startswith(scope + ".")}
            if found:
                return found
        return {}

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
            whole = turned[row] if by_row else turned[row * length : (row + 1) * length]
            rows = whole[self.order[row, start:stop]]
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
            last = _word(name)
            same = None
            if tensor.numel() == self.tokens.numel():
                same = tensor.reshape(self.tokens.shape)[row, self.order[row]]
            if same is not None and any(part in last for part in MASK_NAMES):
                kept &= self._unpadded(row, same != 0)
            elif same is not None and "position" in last:
                starts |= set((same == 0).nonzero().flatten().tolist())
            elif same is None and not tensor.is_floating_point() and len(self.tokens) == 1 and "len" in last:
                values = tensor.reshape(-1).long()
                ends = values if int(values[0]) == 0 else torch.cat([values.new_zeros(1), values.cumsum(0)])
                if int(ends[-1]) == length:
                    starts |= set(ends[:-1].tolist())
        edges = [*sorted(starts), length]
        pieces = []
        for first, last_one in pairwise(edges):
            inside = kept[first:last_one].nonzero().flatten().tolist()
            if inside:
                pieces.append(self._trimmed(row, first + inside[0], first + inside[-1] + 1))
        return pieces

    def _unpadded(self, row: int, mask: torch.Tensor) -> torch.Tensor:
        """The tokens that a mask keeps; one that marks at most one and the same token marks the padding."""
        marked, others = (self.tokens[row][chosen].unique().numel() for chosen in (mask, ~mask))
        return ~mask if marked <= 1 < others else mask

    def _trimmed(self, row: int, start: int, stop: int) -> Tuple[int, int]:
        """A sequence without the run of one token at either end that only padding makes."""
        values = self.tokens[row, start:stop]
        edges = [0, *((values[1:] != values[:-1]).nonzero().flatten() + 1).tolist(), len(values)]
        if len(edges) > 2 and edges[1] >= RUN:
            start += edges[1]
        if len(edges) > 2 and edges[-1] - edges[-2] >= RUN:
            stop -= edges[-1] - edges[-2]
        return start, stop


def _word(name: str) -> str:
    """The last part of a dotted name that is no number: what a tensor is called."""
    return next((part for part in reversed(name.lower().split(".")) if not part.isdecimal()), "")


def load_sample(path: Path) -> Any:
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
        whole = value.is_floating_point() or value.dtype == torch.bool
        return {name or "tensor": value if whole else value.long()}
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
            views = [view for view in sample.views(name, row, start, stop) if view.shape[1] <= len(layers) + 1]
            if not views:
                continue  # more states than a target has: logits, whose number happens to fit
            distances.setdefault(name, []).append([_distances(view, known) for view in views])
    if not distances:
        raise Failed(f"no tensor of the sample holds as few states as a target of {recorded.layers} layers has")
    return {
        "format": FORMAT,
        "layers": recorded.layers,
        "rows": sum(stop - start for _, start, stop in chosen),
        "tokens": sample.tokens_name,
        "tensors": [_matched(name, sample.states[name], found, recorded.layers) for name, found in distances.items()],
    }


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

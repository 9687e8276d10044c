"""The probe's tensors files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from safetensors import safe_open

from whatif.files import Failed

SCHEMA = "2"  # of the probe's tensors files
PATIENCE = 10.0  # seconds until a file of states that is being written is there


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

"""What lies in a model's directory: settings, weights, and the few tensors of a target that are asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Optional

import torch
from safetensors import safe_open

Json = Dict[str, Any]
Weights = Dict[str, torch.Tensor]
FORMAT = 1  # of the answers


class Failed(Exception):  # noqa: N818 - it is a sentence for a person, not a programming error
    """Something that a person has to know, in one sentence."""


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

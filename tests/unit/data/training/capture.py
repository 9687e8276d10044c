"""Makes the files beside it: ENGINE tests/unit/data/training/capture.py (an engine's interpreter, with transformers).

Samples of the lab's target as trainers store them, their states by transformers; what the evaluator says about each,
with states of the replayed tokens in the probe's format (by transformers too) in the server's place.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
sys.path.insert(0, str(ROOT / "lab/models"))

import recipe  # noqa: E402 - found by the path that the line above sets
from train_target import load  # noqa: E402 - found by that path

TOKENS = 150


def states(model: Any, tokens: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Every layer's input and the last one's output, [1, tokens, hidden] each; then that after the final norm."""
    last: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda _layer, _args, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        result = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    hook.remove()
    return [*result.hidden_states[: recipe.LAYERS], last[0].view(1, len(tokens), -1)], result.hidden_states[-1]


def samples(place: Path, tokens: list[int], kept: list[torch.Tensor], normed: torch.Tensor) -> None:
    """One file per sample."""
    ids, half = torch.tensor([tokens]), torch.bfloat16
    packed = torch.cat([kept[layer] for layer in (3, 5, 7)], -1)
    right = {"input_ids": ids, "hidden_state": normed.to(half), "aux_hidden_state": packed.to(half)}
    torch.save({**right, "loss_mask": torch.ones_like(ids)}, place / "right.ckpt")
    stacked = torch.stack([kept[layer][0] for layer in (2, 4, 6)])
    save_file(
        {"a": ids[0].int(), "b": stacked, "m": torch.ones(TOKENS, dtype=torch.int64)}, place / "other.safetensors"
    )
    late = torch.cat([torch.zeros_like(packed[:, :1]), packed[:, :-1]], 1)
    torch.save({"input_ids": ids, "hs": late}, place / "shifted.pt")
    noise = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))
    torch.save({"input_ids": ids, "hs": noise}, place / "stranger.pt")
    torch.save({"ids": ids[0], "all": torch.stack([state[0] for state in kept], 1)}, place / "all.pt")


def main() -> None:
    """Write all answers."""
    model = load(recipe.TARGET)
    text = (ROOT / "lab/models/optim.py").read_text(encoding="utf-8")
    tokens = Tokenizer.from_file(str(recipe.TARGET / "tokenizer.json")).encode(text).ids[:TOKENS]
    kept, normed = states(model, tokens)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        samples(place, tokens, kept, normed)
        recorded = {
            "states": torch.stack([state[0] for state in kept]),
            "input_ids": torch.tensor(tokens),
            "positions": torch.arange(TOKENS),
            "lengths": torch.tensor([TOKENS]),
        }
        about = {"schema": "2", "rank": "0", "requests": json.dumps(["pivot-replay-sample-0"])}
        (place / "records").mkdir()
        save_file(recorded, place / "records/20261129T200000Z-1-1.safetensors", about)
        for path in sorted(place.glob("*.*")):
            asked = {"do": "match sample", "sample": str(path), "target": str(recipe.TARGET)}
            asked["tensors"] = [str(place / "records")]
            line = [sys.executable, "-m", "whatif", json.dumps(asked)]
            done = subprocess.run(
                line, cwd=ROOT / "roles/debug_probes/files", capture_output=True, text=True, check=True
            )
            recipe.write_json(HERE / f"{path.stem}.json", json.loads(done.stdout))


if __name__ == "__main__":
    main()

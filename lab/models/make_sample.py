"""A stored sample of a drafter's training, as trainers keep it: tokens, and the target's states beside them.

Runs with the engine's interpreter. Its layers are [2, 4, 6] on purpose: not those that the lab's drafter is served,
so that comparing training with serving has something to find.
"""

from __future__ import annotations

import recipe
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from train_target import load

SAMPLE = recipe.HERE / "training-sample.safetensors"
LAYERS = [2, 4, 6]
TOKENS = 96


def main() -> None:
    """Command line entry."""
    text = (recipe.HERE / "optim.py").read_text(encoding="utf-8")
    tokens = torch.tensor([Tokenizer.from_file(str(recipe.TARGET / "tokenizer.json")).encode(text).ids[:TOKENS]])
    with torch.no_grad():
        kept = load(recipe.TARGET)(tokens, output_hidden_states=True, use_cache=False).hidden_states
    # hidden_states[i] of transformers is the input of decoder layer i, and the last one stands behind the final norm
    states = torch.cat([kept[layer] for layer in LAYERS], -1).bfloat16()
    stored = {"input_ids": tokens, "aux_hidden_state": states, "hidden_state": kept[-1].bfloat16()}
    save_file({**stored, "loss_mask": torch.ones_like(tokens)}, SAMPLE)


if __name__ == "__main__":
    main()

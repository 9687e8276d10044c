"""The what-if's evaluator against a served drafter: the state that the first draft step hands to the second.

Fingerprints of what the second step consumes are in the probe's records, so the whole drafter is compared (`fc`, norms,
attention over the prompt, rotary embedding, MLP), not only which token it likes best.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "roles/debug_probes/files"))

from whatif.classes import open_drafter
from whatif.drafter import Fed, Memory
from whatif.files import Target


def handed_on(
    drafter: Path, target: Path, layers: Sequence[int], states: torch.Tensor, tokens: Sequence[int]
) -> torch.Tensor:
    """For every row but the last, the state after the first draft step there, [rows, width].

    states: [layers + 1, rows, width], as recorded, for the tokens.
    """
    with torch.inference_mode():
        computed = open_drafter(drafter, Target(target), "cpu")
        rows = torch.arange(len(tokens) - 1)
        embeds = states[0] if computed.shares_embedding else computed.weights["embed_tokens.weight"][list(tokens)]
        hidden = computed.project([states[layer][rows] for layer in layers])
        _, after = computed.step(Fed(rows, hidden, embeds[rows + 1], computed.rotation(rows)), Memory())
        return after


def consumed(records: Sequence[Mapping[str, Any]], rid: str, prompt: int) -> Iterator[tuple[int, str]]:
    """(row, fingerprint) of what the second step of every round of drafting consumed, for a request alone.

    prompt: its tokens. The records are in the order of their making.
    """
    row = prompt - 1
    for record in records:
        if record.get("requests") != [rid]:
            continue
        if record["point"] == "draft" and record["step"] == 1:
            yield row, record["hidden"]
        elif record["point"] == "verify":
            row += record["accepted"][0] + 1

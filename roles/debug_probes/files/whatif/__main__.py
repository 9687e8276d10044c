"""One question, one answer: see this package's docstring."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Sequence, Tuple

import torch

from whatif.classes import open_drafter
from whatif.drafter import Drafter
from whatif.drafting import Replayed, accept, draft, fed_states, summary
from whatif.files import FORMAT, Failed, Json, Target
from whatif.parts import about_embedding, parts
from whatif.repairs import repaired
from whatif.sample import match_sample, read_sample
from whatif.states import States

FAILED = 3


def evaluate(asked: Json) -> Json:
    """The answer to one question (see the package's docstring)."""
    started = time.monotonic()
    device = str(asked.get("device") or "cpu")
    torch.set_num_threads(int(asked.get("threads") or 0) or os.cpu_count() or 1)
    steps, topk = int(asked.get("steps") or 3), int(asked.get("topk") or 1)
    place = Path(asked["target"]) if asked.get("target") else None
    target = Target(place if place and place.is_dir() else None)
    drafter = open_drafter(Path(asked["drafter"]), target, device)
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
    for name, sequence in _sequences(states, asked["sequences"], wanted, notes):
        ids.append(name)
        embedding = embedding or about_embedding(drafter, sequence)
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


def _sequences(
    states: States, asked: Sequence[Json], layers: Sequence[int], notes: List[str]
) -> Iterator[Tuple[str, Replayed]]:
    """What can be evaluated, with its name; a note for each that cannot."""
    for entry in asked:
        try:
            tokens, kept = states.sequence(entry["rid"], layers, entry.get("tokens"))
        except Failed as error:
            notes.append(str(error))
            continue
        sequence = Replayed(tokens, kept, int(entry["prompt_tokens"]))
        if len(tokens) - sequence.prompt < 2:
            notes.append(f"the answer to {entry['id']} has fewer than two tokens: nothing is drafted there")
        else:
            yield entry["id"], sequence


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
                ready.append((str(candidate["name"]), repaired(drafter, repair), chosen, repair))
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
        print(json.dumps({"failed": "whatif takes one argument, a JSON object"}))
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

"""Keeps of a served and evaluated row what the tests read: compact.py DIRECTORY NAME.

DIRECTORY is one of the wiring bench (`lab/faults/bench.py --keep`): outcome.json is what was asked and served,
evaluation.json what the evaluator said. Writes NAME.json beside this file.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from pivot.experiments import ask


def compact(directory: Path) -> dict[str, Any]:
    """The record of the asked prompts, and the evaluation without what `pivot.experiments.whatif` does not read."""
    outcome = json.loads((directory / "outcome.json").read_text(encoding="utf-8"))
    evaluation = json.loads((directory / "evaluation.json").read_text(encoding="utf-8"))
    asked = [
        dataclasses.replace(
            ask.Asked.of(
                prompt["id"], prompt["prompt_ids"], {"output_ids": prompt["output_ids"], "meta_info": prompt["meta"]}
            ),
            replayed=True,
        )
        for prompt in outcome["prompts"]
    ]
    for candidate in evaluation["candidates"]:
        candidate["sequences"] = [
            {"length": round(one["length"], 3), "reached": one["reached"][:1], "passed": one["passed"][:1]}
            for one in candidate["sequences"]
        ]
    record = ask.as_dict(asked, outcome["new_tokens"], outcome["server"])
    for prompt in record["prompts"]:
        prompt["output_ids"] = []
    parts = {
        name: evaluation["parts"][name] for name in ("fc", "head", "d2t", "zero", "not_finite", "rope", "embedding")
    }
    kept = {
        name: evaluation[name] for name in ("steps", "topk", "layers", "sequences", "candidates", "left_out", "notes")
    }
    return {"row": outcome["row"], "asked": record, "evaluation": {**kept, "parts": parts}}


if __name__ == "__main__":
    path = Path(__file__).parent / f"{sys.argv[2]}.json"
    path.write_text(json.dumps(compact(Path(sys.argv[1])), separators=(",", ":")) + "\n", encoding="utf-8")
